//! `jericho discover`: lists what other hosts serve.

use std::process::ExitCode;
use std::time::Duration;

use jericho_ether::{Found, Remote, Security, discover, mac_text};
use serde::Serialize;

use crate::args::DiscoverArgs;
use crate::failure::{Failure, Outcome, print, print_json};
use crate::remote;

/// How long answers are collected.
const TIME: Duration = Duration::from_secs(1);

pub fn run(args: &DiscoverArgs) -> Outcome {
    let refused = |error: &dyn std::error::Error| Failure::new(error.to_string());
    let interfaces = remote::nics_or_all(&args.nic)?;
    let found = discover(&interfaces, args.ethertype, TIME).map_err(|e| refused(&e))?;
    for (one, other) in found.iter().zip(found.iter().skip(1)) {
        if (&one.host, &one.export) == (&other.host, &other.export) {
            eprintln!(
                "jericho: two targets offer {}: {} and {}; start one of them with another --name or --host",
                url(one),
                macs(one).join(", "),
                macs(other).join(", ")
            );
        }
    }
    match args.json {
        true => {
            let exports: Vec<Export> = found
                .iter()
                .map(|one| Export::of(one, &interfaces))
                .collect();
            print_json(&exports)?;
        }
        false => print(&found.iter().map(|one| url(one) + "\n").collect::<String>())?,
    }
    Ok(ExitCode::SUCCESS)
}

fn url(found: &Found) -> String {
    let remote = Remote {
        host: found.host.clone(),
        name: found.export.clone(),
    };
    remote.to_string()
}

fn macs(found: &Found) -> Vec<String> {
    found
        .addresses
        .iter()
        .map(|(_, mac)| mac_text(mac))
        .collect()
}

#[derive(Serialize)]
struct Export {
    url: String,
    read_only: bool,
    security: &'static str,
    usable: bool,
    addresses: Vec<Address>,
}

#[derive(Serialize)]
struct Address {
    nic: String,
    mac: String,
}

impl Export {
    fn of(found: &Found, interfaces: &[String]) -> Export {
        let address = |(link, mac): &(u16, [u8; 6])| Address {
            nic: interfaces[usize::from(*link)].clone(),
            mac: mac_text(mac),
        };
        Export {
            url: url(found),
            security: match found.security {
                Some(Security::None) => "none",
                Some(Security::Mac) => "mac",
                Some(Security::Encrypt) => "encrypt",
                None => "unknown",
            },
            read_only: found.is_read_only,
            usable: found.is_usable,
            addresses: found.addresses.iter().map(address).collect(),
        }
    }
}
