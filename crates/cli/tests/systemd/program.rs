//! A program under `jericho run` that reads or writes a file in a loop. The program is this suite, started as another process.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use crate::commands::{LONG, wait_until};
use crate::processes;
use crate::service::Service;

pub const PAGE: usize = 4096;
/// Pages of the program's file.
pub const PAGES: usize = 64;
/// Accesses after which a program has certainly continued.
const SOME: u64 = 20_000;
/// The variable with the arguments of the process's role.
const ROLE: &str = "JERICHO_TEST_ROLE";
/// The prefix of the lines that a test waits for.
const PREFIX: &str = "program: ";

/// Accesses pages in a round until one fails. Returns its errno, and how many succeeded.
fn access_until_error(file: &File, writes: bool) -> (i32, u64) {
    let deadline = Instant::now() + 3 * LONG;
    let mut page = [0; PAGE];
    for done in 0.. {
        let at = done % PAGES as u64 * PAGE as u64;
        let result = match writes {
            true => file.write_at(&content(done), at),
            false => file.read_at(&mut page, at),
        };
        match result {
            Ok(bytes) => assert_eq!(bytes, PAGE),
            Err(error) => return (error.raw_os_error().expect("an errno"), done),
        }
        assert!(
            !done.is_multiple_of(SOME) || Instant::now() < deadline,
            "no access ever fails"
        );
    }
    unreachable!()
}

/// Returns the page that a program writes in its access `number`.
pub fn content(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(PAGE / 8)
}

/// Runs as the process that `Program` starts.
#[test]
#[ignore = "a part of the cases here, which start it as a process of its own"]
fn role() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let (way, path) = role.split_once('\t').expect("two words");
    let writes = way == "writes";
    let open = || File::options().read(true).write(writes).open(path);
    let first = open().expect("open");
    let (errno, done) = access_until_error(&first, writes);
    println!("{PREFIX}{errno} {done}");
    // The test closes this process's standard input when it ends.
    for order in std::io::stdin().lines() {
        let answer = match &*order.expect("an order") {
            "old file" => first.read_at(&mut [0; PAGE], 0),
            "new file" => open().and_then(|file| file.read_at(&mut [0; PAGE], 0)),
            order => panic!("{order}"),
        };
        match answer {
            Ok(bytes) => println!("{PREFIX}{bytes} bytes"),
            Err(error) => println!("{PREFIX}{error}"),
        }
    }
}

/// A running program. It is killed when dropped.
pub struct Program {
    child: Child,
    orders: ChildStdin,
    lines: Receiver<String>,
}

impl Program {
    /// Starts a program that reads or writes. Returns when its accesses are inline.
    pub fn start(service: &Service, file: &Path, writes: bool) -> Program {
        let way = if writes { "writes" } else { "reads" };
        let me = std::env::current_exe().expect("this program has a path");
        let mut child = Command::new("jericho")
            .args(["run", "--"])
            .arg(me)
            .args(["program::role", "--exact", "--ignored", "--nocapture"])
            .env(ROLE, format!("{way}\t{}", file.display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let orders = child.stdin.take().expect("a pipe");
        let from = BufReader::new(child.stdout.take().expect("a pipe"));
        let (to, lines) = channel();
        std::thread::spawn(move || {
            for line in from.lines().map_while(Result::ok) {
                if let Some((_, line)) = line.split_once(PREFIX) {
                    // The send fails when the test is over. That is harmless.
                    let _ = to.send(line.to_owned());
                }
            }
        });
        let program = Program {
            child,
            orders,
            lines,
        };
        program.wait_until_continues_inline(service);
        program
    }

    pub fn pid(&self) -> u64 {
        self.child.id().into()
    }

    /// Waits until the program has made many more inline accesses.
    pub fn wait_until_continues_inline(&self, service: &Service) {
        let accesses = || {
            let stat = service.stat();
            let clients = stat["clients"].as_array().expect("a list").iter();
            let me = clients.clone().find(|it| it["pid"] == self.pid());
            me.map_or(0, |me| me["local"].as_u64().expect("a number"))
        };
        let before = accesses();
        wait_until("the program goes on inline", || accesses() >= before + SOME);
    }

    /// Waits for the program's next line.
    fn next_line(&self) -> String {
        let line = self.lines.recv_timeout(LONG);
        line.unwrap_or_else(|e| panic!("the program says nothing: {e}"))
    }

    /// Waits until an access of the program has failed, which must be with ENOTCONN, and its part of the memory is freed. Returns how many
    /// accesses succeeded.
    pub fn wait_until_access_fails(&self) -> u64 {
        let line = self.next_line();
        let (errno, done) = line.split_once(' ').expect("two numbers");
        assert_eq!(errno, libc::ENOTCONN.to_string());
        wait_until("the memory is given back", || {
            processes::segments_kib(self.pid()) <= LEFT_KIB_MAX
        });
        done.parse().expect("a number")
    }

    /// Makes the program read a page through its `old file` or a `new file`. Returns the line that the program prints.
    pub fn reads(&mut self, which: &str) -> String {
        writeln!(self.orders, "{which}").expect("the program runs");
        self.next_line()
    }
}

/// Memory that a program may keep of emptied segments: pages of zeros that its calls in progress touched afterwards.
pub const LEFT_KIB_MAX: u64 = 64;

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
