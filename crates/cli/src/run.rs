//! `jericho run`: mounts, runs a command, unmounts.

use std::io::IsTerminal;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus};

use rustix::process::{Pid, Signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::args::RunArgs;
use crate::failure::{Context, Failure, Outcome};
use crate::{background, umount};

pub fn run(args: &RunArgs) -> Outcome {
    let (Some(volume), Some(dir)) = (&args.volume, &args.at) else {
        return Err(Failure::new(
            "say which volume and where: jericho run --volume VOLUME --at DIR -- CMD. Running a \
             command on volumes that are mounted already, without the kernel in the way of its \
             reads and writes, is planned and not there yet",
        ));
    };
    let (program, arguments) = args.command.split_first().ok_or_else(|| {
        Failure::new("no command was given; write it after --, for example -- bash")
    })?;
    // Held back from here on: a signal must not end us between mount and unmount.
    let mut signals =
        Signals::new([SIGTERM, SIGINT, SIGHUP]).context("cannot listen for signals")?;
    let checked = background::check(volume, dir, &args.options)?;
    background::start(&checked, &args.options)?;

    let outcome = Command::new(program)
        .args(arguments)
        .spawn()
        .context(format_args!("cannot run {}", program.display()))
        .and_then(|child| wait(child, &mut signals));
    let unmounted = umount::unmount(&checked.dir);
    let status = outcome?;
    let code = status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    match unmounted {
        Ok(()) => Ok(ExitCode::from(code as u8)),
        Err(failure) if code != 0 => {
            eprintln!("jericho: {failure}");
            Ok(ExitCode::from(code as u8))
        }
        Err(failure) => Err(failure),
    }
}

/// Waits for the command and passes signals on to it.
fn wait(mut child: Child, signals: &mut Signals) -> Result<ExitStatus, Failure> {
    let pid = Pid::from_child(&child);
    let handle = signals.handle();
    // Ctrl-C reaches the command from the terminal too; twice would be a different wish.
    let from_terminal = std::io::stdin().is_terminal();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for signal in signals.forever() {
                let signal = match signal {
                    SIGTERM => Signal::TERM,
                    SIGHUP => Signal::HUP,
                    _ if from_terminal => continue,
                    _ => Signal::INT,
                };
                // Already gone: then `wait` is about to say so.
                if let Err(error) = rustix::process::kill_process(pid, signal) {
                    eprintln!("jericho: cannot pass a signal on: {error}");
                }
            }
        });
        let status = child.wait().context("cannot wait for the command");
        handle.close();
        status
    })
}
