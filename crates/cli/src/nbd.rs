//! `jericho nbd`: serves a device to NBD clients until a signal ends it.

use std::fs::File;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use jericho_export::{Export, ExportOptions, Listener, NAME_BYTES_MAX, Server, TCP_PORT};
use jericho_storage::{Access, Claim, ClaimError, Device, OpenOptions, open_device};
use jericho_sys::block;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::args::NbdArgs;
use crate::failure::{Context, Failure, Outcome, print};
use crate::{logging, mounts, notify, remote, size};

pub fn run(args: &NbdArgs) -> Outcome {
    logging::start();
    // Listens before the socket file is there, so that a signal never leaves it behind.
    let mut signals =
        Signals::new([SIGTERM, SIGINT, SIGHUP]).context("cannot listen for signals")?;
    if args.name.len() > NAME_BYTES_MAX {
        return Err(Failure::new(format!(
            "the name has more than {NAME_BYTES_MAX} bytes: choose a shorter one with --name"
        )));
    }
    let shown = args.device.display();
    let (device, claim) = open(args)?;
    let size_bytes = device.size_bytes();
    tracing::info!("{}", device.describe());
    let export = ExportOptions {
        name: args.name.clone(),
        read_only: args.read_only,
    };
    let listener = match (&args.socket, &args.listen) {
        (Some(path), _) => Listener::unix(path),
        (None, Some(address)) => Listener::tcp(resolve(address)?),
        (None, None) => unreachable!("the command line requires one of them"),
    };
    let listener = listener.map_err(|e| Failure::new(e.to_string()))?;
    let server = Server::start(Export::new(device, export), listener)
        .map_err(|e| Failure::new(e.to_string()))?;
    let uri = server.uri();
    let printed = print(&format!(
        "serving {shown} ({}) at {uri}\n",
        size::human(size_bytes)
    ));
    if printed.is_ok() {
        notify::ready(&format!("{shown} at {uri}"));
        signals.forever().next();
        notify::stopping();
    }
    let stopped = server.stop();
    drop(claim);
    stopped.context("not everything is durable")?;
    printed?;
    Ok(ExitCode::SUCCESS)
}

/// Opens the device. One of this host is claimed; one of another host is claimed there.
fn open(args: &NbdArgs) -> Result<(Arc<dyn Device>, Option<Claim>), Failure> {
    if let Some(name) = remote::named(&args.device)? {
        return Ok((remote::attach(name, &args.remote)?, None));
    }
    let claim = claim(&args.device, args.read_only)?;
    let options = OpenOptions {
        read_only: args.read_only,
        ..OpenOptions::default()
    };
    let device = open_device(&args.device, options).context("cannot serve")?;
    warn_of_rest(&args.device, device.size_bytes());
    Ok((device, Some(claim)))
}

/// Claims the device against all other processes.
fn claim(path: &Path, read_only: bool) -> Result<Claim, Failure> {
    let access = match read_only {
        true => Access::Shared,
        false => Access::Exclusive,
    };
    Claim::take(path, access, false).map_err(|error| match error {
        ClaimError::Held { .. } => Failure::new(format!("{error}; {}", remedy(path, read_only))),
        error => Failure::new(format!("cannot serve {}: {error}", path.display())),
    })
}

/// Returns what to do about a device in use.
fn remedy(path: &Path, read_only: bool) -> String {
    let mounted = mounts::of_volume(path).ok().flatten();
    match mounted.filter(|_| !path.is_dir()) {
        Some(dir) => format!("unmount the volume first: jericho umount {}", dir.display()),
        None if read_only => "end the process that writes to it first".into(),
        None => "end that process first, or serve another device".into(),
    }
}

/// Warns of bytes after the last whole block, which clients cannot reach.
fn warn_of_rest(path: &Path, served_bytes: u64) {
    let present_bytes =
        std::fs::metadata(path).and_then(|metadata| match metadata.file_type().is_block_device() {
            true => block::device_size_bytes(File::open(path)?),
            false => Ok(metadata.len()),
        });
    if let Ok(present_bytes) = present_bytes
        && present_bytes > served_bytes
    {
        tracing::warn!(
            "the last {} bytes of {} are not served, because they are no whole block of 4096 bytes",
            present_bytes - served_bytes,
            path.display()
        );
    }
}

/// Returns the address that a user has written: an IP address or a host name, with or without a port.
fn resolve(text: &str) -> Result<SocketAddr, Failure> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let bare = text.trim_start_matches('[').trim_end_matches(']');
    if let Ok(ip) = bare.parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, TCP_PORT));
    }
    let resolved = match text.contains(':') {
        true => text.to_socket_addrs(),
        false => (text, TCP_PORT).to_socket_addrs(),
    };
    let mut addresses = resolved.context(format_args!(
        "cannot find the address {text} (write for example 127.0.0.1:{TCP_PORT})"
    ))?;
    let first = addresses.next();
    first.ok_or_else(|| Failure::new(format!("the host {text} has no address")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_may_lack_the_port() {
        for (text, address) in [
            ("127.0.0.1:7", "127.0.0.1:7"),
            ("127.0.0.1", "127.0.0.1:10809"),
            ("[::1]:7", "[::1]:7"),
            ("[::1]", "[::1]:10809"),
            ("::1", "[::1]:10809"),
        ] {
            assert_eq!(resolve(text), Ok(address.parse().unwrap()), "{text}");
        }
        let refused = resolve("127.0.0.1:port").unwrap_err().to_string();
        assert!(refused.contains("127.0.0.1:port"), "{refused}");
    }
}
