//! `jericho run`: runs a command with the library that serves its reads and writes inline. Mounts a volume for the command if
//! requested.

use std::io::IsTerminal;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitCode, ExitStatus};

use jericho_fuse::Transport;
use rustix::process::{Pid, Signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::args::{MountOptions, RunArgs};
use crate::failure::{Context, Failure, Outcome};
use crate::{mount, mountable, preload, umount};

pub fn run(args: &RunArgs) -> Outcome {
    let (program, arguments) = args.command.split_first().ok_or_else(|| {
        Failure::new("no command was given; write it after --, for example -- bash")
    })?;
    // Searches for the library before the mount, so that a missing library is reported first.
    let library = match args.no_preload {
        true => None,
        false => Some(preload::find()?),
    };
    let mut command = Command::new(program);
    command.args(arguments);
    let prepare = |command: &mut Command| match &library {
        Some(library) => {
            let options = &args.options;
            preload::set(command, library, options.threads, options.with_parent)
        }
        None => {
            preload::unset(command);
            Ok(())
        }
    };
    match (&args.volume, &args.at) {
        (Some(volume), Some(dir)) => on_mount(volume, dir, &args.options, command, prepare),
        _ => {
            refuse_mount_options(&args.options)?;
            refuse_unused_policy(args)?;
            prepare(&mut command)?;
            // The command replaces this process, because nothing remains to do afterwards.
            let error = command.exec();
            Err(cannot_run(&command, error))
        }
    }
}

/// Fails if options of a mount are given without a mount. They would have no effect.
fn refuse_mount_options(options: &MountOptions) -> Result<(), Failure> {
    let options = [
        ("--cache", options.cache.is_some()),
        ("--spill", options.spill.is_some()),
        ("--topology", options.topology != "auto"),
        ("--transport", options.transport != Transport::Auto),
        ("--scrub-rate", options.scrub_rate.is_some()),
        ("--read-only", options.read_only),
        ("--log", options.log.is_some()),
        ("--nic", !options.remote.nic.is_empty()),
        ("--take-over", options.remote.take_over),
        ("--no-replay", options.remote.no_replay),
    ];
    let given: Vec<&str> = options
        .iter()
        .filter(|(_, is_given)| *is_given)
        .map(|(name, _)| *name)
        .collect();
    match given.is_empty() {
        true => Ok(()),
        false => Err(Failure::new(format!(
            "options of a mount without a mount: {}. Name the mount with --volume VOLUME --at DIR, or omit the \
             options to use the mounts that exist",
            given.join(", ")
        ))),
    }
}

/// Fails if an option is given that neither the library nor a mount of this command would read.
fn refuse_unused_policy(args: &RunArgs) -> Result<(), Failure> {
    if args.no_preload && args.options.threads.is_some() {
        return Err(Failure::new(
            "--threads has no effect with --no-preload, because only the library reads it; leave one of \
             them out, or set the policy of a directory with: jericho place DIR --threads POLICY",
        ));
    }
    if args.no_preload && args.options.with_parent {
        return Err(Failure::new(
            "--with-parent has no effect with --no-preload, because only the library reads it; leave one of \
             them out, or give --with-parent to the mount",
        ));
    }
    Ok(())
}

fn cannot_run(command: &Command, error: std::io::Error) -> Failure {
    Failure::new(format!(
        "cannot run {}: {error}",
        command.get_program().display()
    ))
}

/// Mounts the volume, runs the command, and unmounts the volume.
fn on_mount(
    volume: &Path,
    dir: &Path,
    options: &MountOptions,
    mut command: Command,
    prepare: impl FnOnce(&mut Command) -> Result<(), Failure>,
) -> Outcome {
    let checked = mountable::check(volume, dir, options)?;
    umount::wait_for_former(&checked.volume);
    // Collects signals from here on: a signal must not end this process between mount and unmount.
    let mut signals =
        Signals::new([SIGTERM, SIGINT, SIGHUP]).context("cannot listen for signals")?;
    mount::start(&checked, options)?;

    // Prepares the environment after the mount, so that it names the mount.
    let outcome = prepare(&mut command)
        .and_then(|()| command.spawn().map_err(|e| cannot_run(&command, e)))
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
    // The terminal sends Ctrl-C to the command too, and commands react differently to a second one.
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
                // The command may have ended already; then `wait` reports that.
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
