//! The negotiation with a client: fixed newstyle (proto.md, "Fixed newstyle negotiation").
//!
//! ```text
//! greet ──▶ options: answer ──▶ OPT_EXPORT_NAME, OPT_GO ──▶ transmission
//!              └──▲    └──▶ OPT_ABORT, an error ──▶ end
//! ```

use std::io::{Read, Write};

use jericho_storage::BLOCK_BYTES;

use crate::ended::Ended;
use crate::export::Export;
use crate::options::{ClientOption, parse};
use crate::protocol::{
    BLOCK_BYTES_MIN, CONTEXT_ALLOCATION, CONTEXT_ALLOCATION_ID, CONTEXT_NAMESPACE,
    EXPORT_NAME_ZEROS, FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, FLAG_SEND_DF, IHAVEOPT,
    INFO_BLOCK_SIZE, INFO_DESCRIPTION, INFO_EXPORT, INFO_NAME, NBDMAGIC, OPTION_REPLY_MAGIC,
    PAYLOAD_BYTES_MAX, REP_ACK, REP_ERR_INVALID, REP_ERR_SHUTDOWN, REP_ERR_UNKNOWN, REP_ERR_UNSUP,
    REP_INFO, REP_META_CONTEXT, REP_SERVER,
};

/// Maximum length of an option's data. The longest sensible one has a name and a few queries.
const OPTION_BYTES_MAX: u32 = 64 << 10;
/// Maximum number of options. A client needs about five.
const OPTIONS_MAX: usize = 1000;

const IN_THE_NEGOTIATION: &str = "during the negotiation";

/// What both sides have agreed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Agreed {
    /// Replies may be structured; those to reads must be.
    pub has_structured_replies: bool,
    /// The client may ask for the block status.
    pub has_allocation: bool,
}

struct Negotiation<'e, W> {
    export: &'e Export,
    output: W,
    agreed: Agreed,
    /// The export name of the last `OPT_SET_META_CONTEXT`. For another one the selection does not count.
    allocation_of: Option<Vec<u8>>,
    omits_zeros: bool,
}

/// What follows an option.
enum Next {
    Option,
    Transmission,
    End,
}

/// Negotiates with a client. Returns `None` when the client has ended the negotiation.
pub(crate) fn negotiate(
    export: &Export,
    mut input: impl Read,
    mut output: impl Write,
) -> Result<Option<Agreed>, Ended> {
    let mut greeting = [NBDMAGIC.to_be_bytes(), IHAVEOPT.to_be_bytes()].concat();
    greeting.extend(((FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES) as u16).to_be_bytes());
    output.write_all(&greeting).map_err(Ended::writing)?;
    let flags = u32::from_be_bytes(take(&mut input)?);
    if flags & !(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES) != 0 {
        let what = format!("the unknown client flags {flags:#x}");
        return Err(Ended::Protocol(what));
    }
    let mut negotiation = Negotiation {
        export,
        output,
        agreed: Agreed::default(),
        allocation_of: None,
        omits_zeros: flags & FLAG_NO_ZEROES != 0,
    };
    for _ in 0..OPTIONS_MAX {
        let (option, data) = read_option(&mut input)?;
        match negotiation.answer(option, &data)? {
            Next::Option => {}
            Next::Transmission => return Ok(Some(negotiation.agreed)),
            Next::End => return Ok(None),
        }
    }
    let what = format!("more than {OPTIONS_MAX} options");
    Err(Ended::Protocol(what))
}

/// Reads the next bytes of the negotiation.
fn take<const BYTES: usize>(input: &mut impl Read) -> Result<[u8; BYTES], Ended> {
    let mut bytes = [0; BYTES];
    input
        .read_exact(&mut bytes)
        .map_err(Ended::reading(IN_THE_NEGOTIATION))?;
    Ok(bytes)
}

fn read_option(input: &mut impl Read) -> Result<(u32, Vec<u8>), Ended> {
    let magic = u64::from_be_bytes(take(input)?);
    if magic != IHAVEOPT {
        let what = format!("{magic:#x} instead of an option's magic number");
        return Err(Ended::Protocol(what));
    }
    let option = u32::from_be_bytes(take(input)?);
    let length = u32::from_be_bytes(take(input)?);
    if length > OPTION_BYTES_MAX {
        let what =
            format!("option {option} with {length} bytes; at most {OPTION_BYTES_MAX} are accepted");
        return Err(Ended::Protocol(what));
    }
    let mut data = vec![0; length as usize];
    input
        .read_exact(&mut data)
        .map_err(Ended::reading(IN_THE_NEGOTIATION))?;
    Ok((option, data))
}

impl<W: Write> Negotiation<'_, W> {
    fn answer(&mut self, option: u32, data: &[u8]) -> Result<Next, Ended> {
        let parsed = match parse(option, data) {
            Ok(parsed) => parsed,
            Err(why) => {
                self.reply(option, REP_ERR_INVALID, why.as_bytes())?;
                return Ok(Next::Option);
            }
        };
        match parsed {
            ClientOption::Abort => {
                // An error is ignored: the client need not wait for the answer.
                let _ = self.reply(option, REP_ACK, &[]);
                return Ok(Next::End);
            }
            _ if self.export.is_ending() => {
                self.reply(option, REP_ERR_SHUTDOWN, b"the server is ending")?;
                return Ok(Next::End);
            }
            ClientOption::ExportName(name) => return self.start_by_name(name),
            ClientOption::List => {
                let name = self.export.name().as_bytes();
                let entry = [&(name.len() as u32).to_be_bytes(), name].concat();
                self.reply(option, REP_SERVER, &entry)?;
                self.reply(option, REP_ACK, &[])?;
            }
            ClientOption::StructuredReply => {
                self.agreed.has_structured_replies = true;
                self.reply(option, REP_ACK, &[])?;
            }
            ClientOption::Info {
                name,
                kinds,
                starts_transmission,
            } => {
                let is_known = self.inform(option, name, &kinds)?;
                if is_known && starts_transmission {
                    self.settle_on(name);
                    return Ok(Next::Transmission);
                }
            }
            ClientOption::MetaContext {
                name,
                queries,
                selects,
            } => self.meta_context(option, name, &queries, selects)?,
            ClientOption::Unknown => {
                self.reply(
                    option,
                    REP_ERR_UNSUP,
                    b"this server does not have the option",
                )?;
            }
        }
        Ok(Next::Option)
    }

    /// Returns whether a client may ask for the export by this name.
    fn is_known(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.export.name().as_bytes()
    }

    /// Decides which of the selections count for the export of this name.
    fn settle_on(&mut self, name: &[u8]) {
        self.agreed.has_allocation = self.allocation_of.as_deref() == Some(name);
    }

    fn transmission_flags(&self) -> u16 {
        match self.agreed.has_structured_replies {
            true => self.export.flags() | FLAG_SEND_DF,
            false => self.export.flags(),
        }
    }

    /// Answers `OPT_EXPORT_NAME`, which has no error reply.
    fn start_by_name(&mut self, name: &[u8]) -> Result<Next, Ended> {
        if !self.is_known(name) {
            return Err(Ended::Protocol(format!(
                "the unknown export name {:?}",
                String::from_utf8_lossy(name)
            )));
        }
        let mut answer = self.export.disk.size_bytes().to_be_bytes().to_vec();
        answer.extend(self.transmission_flags().to_be_bytes());
        if !self.omits_zeros {
            answer.extend([0; EXPORT_NAME_ZEROS]);
        }
        self.output.write_all(&answer).map_err(Ended::writing)?;
        self.settle_on(name);
        Ok(Next::Transmission)
    }

    /// Answers `OPT_INFO` and `OPT_GO`. Returns whether the export exists.
    fn inform(&mut self, option: u32, name: &[u8], kinds: &[u16]) -> Result<bool, Ended> {
        if !self.is_known(name) {
            self.reply(option, REP_ERR_UNKNOWN, b"there is no export of this name")?;
            return Ok(false);
        }
        let mut export = self.export.disk.size_bytes().to_be_bytes().to_vec();
        export.extend(self.transmission_flags().to_be_bytes());
        self.info(option, INFO_EXPORT, &export)?;
        let sizes = [BLOCK_BYTES_MIN, BLOCK_BYTES as u32, PAYLOAD_BYTES_MAX];
        let sizes = sizes.map(u32::to_be_bytes).concat();
        self.info(option, INFO_BLOCK_SIZE, &sizes)?;
        if kinds.contains(&INFO_NAME) {
            self.info(option, INFO_NAME, self.export.name().as_bytes())?;
        }
        if kinds.contains(&INFO_DESCRIPTION) {
            let description = self.export.description();
            self.info(option, INFO_DESCRIPTION, description.as_bytes())?;
        }
        self.reply(option, REP_ACK, &[])?;
        Ok(true)
    }

    fn info(&mut self, option: u32, kind: u16, data: &[u8]) -> Result<(), Ended> {
        let data = [&kind.to_be_bytes(), data].concat();
        self.reply(option, REP_INFO, &data)
    }

    /// Answers `OPT_LIST_META_CONTEXT` and `OPT_SET_META_CONTEXT` (`selects`).
    fn meta_context(
        &mut self,
        option: u32,
        name: &[u8],
        queries: &[&[u8]],
        selects: bool,
    ) -> Result<(), Ended> {
        if selects {
            self.allocation_of = None;
        }
        if !self.agreed.has_structured_replies {
            let why = b"structured replies must be negotiated first";
            return self.reply(option, REP_ERR_INVALID, why);
        }
        if !self.is_known(name) {
            return self.reply(option, REP_ERR_UNKNOWN, b"there is no export of this name");
        }
        let is_asked = match selects {
            true => queries.contains(&CONTEXT_ALLOCATION),
            false => {
                let all = [CONTEXT_NAMESPACE, CONTEXT_ALLOCATION];
                queries.is_empty() || queries.iter().any(|query| all.contains(query))
            }
        };
        if is_asked {
            // The number means nothing in a list.
            let id = if selects { CONTEXT_ALLOCATION_ID } else { 0 };
            let context = [&id.to_be_bytes(), CONTEXT_ALLOCATION].concat();
            self.reply(option, REP_META_CONTEXT, &context)?;
            if selects {
                self.allocation_of = Some(name.to_vec());
            }
        }
        self.reply(option, REP_ACK, &[])
    }

    fn reply(&mut self, option: u32, kind: u32, data: &[u8]) -> Result<(), Ended> {
        let mut message = OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
        message.extend(option.to_be_bytes());
        message.extend(kind.to_be_bytes());
        message.extend((data.len() as u32).to_be_bytes());
        message.extend(data);
        self.output.write_all(&message).map_err(Ended::writing)
    }
}
