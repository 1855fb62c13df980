//! Asks the daemon about an open file, with an ioctl on the file's fd.

use jericho_shm::{Answer, Call};
use jericho_sys::files;

/// Returns the daemon's answer. Fails with an errno: ENOTTY for a file of another filesystem.
pub fn ask(fd: i32, call: Call) -> Result<Answer, i32> {
    #[cfg(test)]
    if let Some(answer) = tests::answer(fd, call) {
        return Ok(answer);
    }
    let (request, mut bytes) = call.encode();
    files::ioctl(fd, request, &mut bytes)?;
    Ok(Answer::decode(&bytes))
}

#[cfg(test)]
pub mod tests {
    //! A daemon for tests: answers for files that are on no mount.

    use std::collections::HashMap;
    use std::sync::Mutex;

    use super::*;

    type Daemon = Box<dyn Fn(Call) -> Answer + Send>;
    static DAEMONS: Mutex<Option<HashMap<u64, Daemon>>> = Mutex::new(None);

    /// Answers for the file with this inode from now on.
    pub fn serve(inode: u64, daemon: impl Fn(Call) -> Answer + Send + 'static) {
        let mut daemons = DAEMONS.lock().unwrap();
        daemons
            .get_or_insert_default()
            .insert(inode, Box::new(daemon));
    }

    pub fn answer(fd: i32, call: Call) -> Option<Answer> {
        let inode = files::fstat(fd).ok()?.inode;
        let daemons = DAEMONS.lock().unwrap();
        Some(daemons.as_ref()?.get(&inode)?(call))
    }
}
