//! `jericho nbd`: serves a device to NBD clients until a signal ends it.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::process::ExitCode;

use jericho_export::{Export, ExportOptions, Listener, NAME_BYTES_MAX, Server, TCP_PORT};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::args::NbdArgs;
use crate::failure::{Context, Failure, Outcome, print};
use crate::{logging, notify, served, size};

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
    let (device, claim) = served::open(&args.device, args.read_only)?;
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
