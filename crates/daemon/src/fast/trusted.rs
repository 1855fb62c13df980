//! The users whose processes receive a volume's segments, and so access its cache directly.

use jericho_sys::accounts;

/// Users and groups that are trusted with a volume's whole cache, in addition to its owner and the daemon's user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trusted {
    uids: Vec<u32>,
    gids: Vec<u32>,
}

/// The thread that makes a request.
#[derive(Debug, Clone, Copy)]
pub struct Asker {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Thread id in the daemon's pid namespace; 0 when the thread has none there.
    pub thread: u32,
}

/// Why a name cannot be resolved.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the fields are what the messages name
pub enum TrustedError {
    #[error(
        "there is no user and no group called {0:?}; `getent passwd` and `getent group` list those that exist"
    )]
    Nobody(String),
    #[error("there is no group called {0:?}; `getent group` lists those that exist")]
    NoGroup(String),
    #[error("the user {member:?} of the group {group:?} cannot be found: {cause}")]
    Member {
        group: String,
        member: String,
        cause: std::io::Error,
    },
    #[error("cannot look up {name:?}: {cause}")]
    LookUp { name: String, cause: std::io::Error },
}

impl Trusted {
    /// Looks up the users and groups with these names: `NAME` is a user or else a group, `:NAME` is a group. A number is an id.
    ///
    /// Trusts the members that the group database lists now, and every process with that effective group. Fails with the first
    /// name that cannot be resolved.
    pub fn from_names<S: AsRef<str>>(names: &[S]) -> Result<Trusted, TrustedError> {
        let mut trusted = Trusted::default();
        for name in names {
            trusted.add(name.as_ref())?;
        }
        Ok(trusted)
    }

    /// Adds a trusted user.
    pub fn add_uid(&mut self, uid: u32) {
        self.uids.push(uid);
    }

    /// Returns whether a process with these effective ids is trusted.
    pub fn includes(&self, uid: u32, gid: u32) -> bool {
        self.uids.contains(&uid) || self.gids.contains(&gid)
    }

    fn add(&mut self, name: &str) -> Result<(), TrustedError> {
        let look_up = |cause| TrustedError::LookUp {
            name: name.to_owned(),
            cause,
        };
        if let Some(group) = name.strip_prefix(':') {
            return match self.add_group(group)? {
                true => Ok(()),
                false => Err(TrustedError::NoGroup(group.to_owned())),
            };
        }
        // As in chown(1), a name that consists of digits is first looked up as a name.
        let uid = accounts::user_id(name).map_err(look_up)?;
        if let Some(uid) = uid.or_else(|| id(name)) {
            self.uids.push(uid);
            return Ok(());
        }
        match self.add_group(name)? {
            true => Ok(()),
            false => Err(TrustedError::Nobody(name.to_owned())),
        }
    }

    /// Returns false when there is no such group.
    fn add_group(&mut self, name: &str) -> Result<bool, TrustedError> {
        let found = accounts::group(name).map_err(|cause| TrustedError::LookUp {
            name: name.to_owned(),
            cause,
        })?;
        let Some(group) = found else {
            self.gids.extend(id(name));
            return Ok(id(name).is_some());
        };
        self.gids.push(group.gid);
        for member in group.members {
            match accounts::user_id(&member) {
                Ok(uid) => self.uids.extend(uid),
                Err(cause) => {
                    return Err(TrustedError::Member {
                        group: name.to_owned(),
                        member,
                        cause,
                    });
                }
            }
        }
        Ok(true)
    }
}

/// Parses an id. Rejects the largest number, which means *no change* to the kernel.
fn id(name: &str) -> Option<u32> {
    let digits = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit());
    name.parse().ok().filter(|id| digits && *id != u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_are_users_and_groups() {
        let none: [&str; 0] = [];
        assert!(!Trusted::from_names(&none).unwrap().includes(0, 0));
        let root = Trusted::from_names(&["root"]).unwrap();
        assert!(
            root.includes(0, 77) && !root.includes(77, 0),
            "a user first"
        );
        let group = Trusted::from_names(&[":root"]).unwrap();
        assert!(group.includes(77, 0));
        let ids = Trusted::from_names(&["54321", ":54322"]).unwrap();
        assert!(ids.includes(54321, 1) && ids.includes(1, 54322));
        assert!(!ids.includes(54322, 54321));
    }

    #[test]
    fn an_error_names_the_name_that_does_not_exist() {
        for bad in [
            "no-such-name",
            ":no-such-name",
            "",
            ":",
            "-1",
            "4294967295",
            "+5",
        ] {
            let error = Trusted::from_names(&["root", bad]).unwrap_err();
            let shown = format!("{:?}", bad.trim_start_matches(':'));
            assert!(error.to_string().contains(&shown), "{error}");
        }
    }
}
