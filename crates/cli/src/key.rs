//! `jericho key`: makes and names the keys of clients.

use std::process::ExitCode;

use jericho_ether::{hexadecimal, new_key, read_key};

use crate::args::{KeyArgs, KeyCommand};
use crate::failure::{Failure, Outcome, print};

pub fn run(args: &KeyArgs) -> Outcome {
    let failed = |error: jericho_ether::KeyError| Failure::new(error.to_string());
    match &args.command {
        KeyCommand::New => print(&format!("{}\n", *new_key().map_err(failed)?.to_text()))?,
        KeyCommand::Fingerprint(args) => {
            let key = read_key(&args.file).map_err(failed)?;
            print(&format!("{}\n", hexadecimal(&key.fingerprint())))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
