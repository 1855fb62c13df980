//! Names of remote devices: `tyche://HOST/NAME`.

use std::fmt;
use std::str::FromStr;

use jericho_format::wire::NAME_BYTES;

const SCHEME: &str = "tyche://";

/// A device of another host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Name of the host.
    pub host: String,
    /// Name of the export.
    pub name: String,
}

/// Why a text names no remote device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// It has another form.
    #[error("{0}: a remote device is written tyche://HOST/NAME")]
    Form(String),
    /// A part is empty, too long, or has a control character or a slash.
    #[error(
        "{text}: the {part} needs 1 to {NAME_BYTES} bytes, without slashes and control characters"
    )]
    Part {
        /// The text.
        text: String,
        /// "host" or "name".
        part: &'static str,
    },
}

impl Remote {
    /// Returns whether a text can be the name of a host or an export.
    pub fn is_name(text: &str) -> bool {
        let is_bad = |c: char| c.is_control() || c == '/';
        (1..=NAME_BYTES).contains(&text.len()) && !text.contains(is_bad)
    }
}

impl FromStr for Remote {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Remote, UrlError> {
        let form = || UrlError::Form(text.to_owned());
        let rest = text.strip_prefix(SCHEME).ok_or_else(form)?;
        let (host, name) = rest.split_once('/').ok_or_else(form)?;
        for (part, value) in [("host", host), ("name", name)] {
            if !Remote::is_name(value) {
                let text = text.to_owned();
                return Err(UrlError::Part { text, part });
            }
        }
        Ok(Remote {
            host: host.to_owned(),
            name: name.to_owned(),
        })
    }
}

impl fmt::Display for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}/{}", self.host, self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_a_remote_device_has_a_host_and_a_name() {
        let remote: Remote = "tyche://hostb/data".parse().unwrap();
        assert_eq!((&*remote.host, &*remote.name), ("hostb", "data"));
        assert_eq!(remote.to_string(), "tyche://hostb/data");
        for text in [
            "hostb/data",
            "tyche://hostb",
            "tyche:///data",
            "tyche://hostb/",
            "tyche://a/b/c",
        ] {
            assert!(text.parse::<Remote>().is_err(), "{text}");
        }
        let long = format!("tyche://hostb/{}", "x".repeat(65));
        assert!(long.parse::<Remote>().is_err());
    }
}
