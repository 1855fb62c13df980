//! Parses the options of the negotiation (proto.md, "Option types"). No I/O.

use crate::protocol::{
    OPT_ABORT, OPT_EXPORT_NAME, OPT_GO, OPT_INFO, OPT_LIST, OPT_LIST_META_CONTEXT,
    OPT_SET_META_CONTEXT, OPT_STRUCTURED_REPLY, STRING_BYTES_MAX,
};

/// An option of a client.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ClientOption<'d> {
    ExportName(&'d [u8]),
    Abort,
    List,
    /// `OPT_INFO` and `OPT_GO`.
    Info {
        name: &'d [u8],
        /// Requested kinds of information.
        kinds: Vec<u16>,
        starts_transmission: bool,
    },
    StructuredReply,
    /// `OPT_LIST_META_CONTEXT` and `OPT_SET_META_CONTEXT`.
    MetaContext {
        name: &'d [u8],
        queries: Vec<&'d [u8]>,
        selects: bool,
    },
    /// An option that this server does not have, for example TLS.
    Unknown,
}

/// Takes values from the front of an option's data.
struct Data<'d>(&'d [u8]);

/// What is wrong with an option's data. A text for the client.
type Invalid = &'static str;

const TOO_SHORT: Invalid = "the data of the option is too short";

impl<'d> Data<'d> {
    fn bytes(&mut self, count: usize) -> Result<&'d [u8], Invalid> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(TOO_SHORT)?;
        self.0 = rest;
        Ok(taken)
    }

    fn u16(&mut self) -> Result<u16, Invalid> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(TOO_SHORT)?;
        self.0 = rest;
        Ok(u16::from_be_bytes(*taken))
    }

    fn u32(&mut self) -> Result<u32, Invalid> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(TOO_SHORT)?;
        self.0 = rest;
        Ok(u32::from_be_bytes(*taken))
    }

    /// Takes a string with its length in front.
    fn string(&mut self) -> Result<&'d [u8], Invalid> {
        let length = self.u32()? as usize;
        match length <= STRING_BYTES_MAX {
            true => self.bytes(length),
            false => Err("a string is longer than 4096 bytes"),
        }
    }

    fn end(self) -> Result<(), Invalid> {
        match self.0.is_empty() {
            true => Ok(()),
            false => Err("the data of the option is too long"),
        }
    }
}

/// Parses an option.
pub(crate) fn parse(option: u32, data: &[u8]) -> Result<ClientOption<'_>, Invalid> {
    let mut rest = Data(data);
    let parsed = match option {
        OPT_EXPORT_NAME => return Ok(ClientOption::ExportName(data)),
        // The data of an abort has no meaning, and the answer is the same for all.
        OPT_ABORT => return Ok(ClientOption::Abort),
        OPT_LIST => ClientOption::List,
        OPT_STRUCTURED_REPLY => ClientOption::StructuredReply,
        OPT_INFO | OPT_GO => {
            let name = rest.string()?;
            let count = rest.u16()?;
            ClientOption::Info {
                name,
                kinds: (0..count).map(|_| rest.u16()).collect::<Result<_, _>>()?,
                starts_transmission: option == OPT_GO,
            }
        }
        OPT_LIST_META_CONTEXT | OPT_SET_META_CONTEXT => {
            let name = rest.string()?;
            // Ends at the end of the data, whatever the count is.
            let count = rest.u32()?;
            ClientOption::MetaContext {
                name,
                queries: (0..count)
                    .map(|_| rest.string())
                    .collect::<Result<_, _>>()?,
                selects: option == OPT_SET_META_CONTEXT,
            }
        }
        _ => return Ok(ClientOption::Unknown),
    };
    rest.end()?;
    Ok(parsed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_parsed_and_damaged_ones_refused() {
        let data = b"\0\0\0\x01n\0\x02\0\x03\0\x01";
        let parsed = ClientOption::Info {
            name: b"n",
            kinds: vec![3, 1],
            starts_transmission: true,
        };
        assert_eq!(parse(OPT_GO, data), Ok(parsed));
        for length in 0..data.len() {
            assert_eq!(parse(OPT_GO, &data[..length]), Err(TOO_SHORT));
        }
        assert!(parse(OPT_GO, &[&data[..], b"x"].concat()).is_err());

        let data = b"\0\0\0\0\0\0\0\x01\0\0\0\x05base:";
        let parsed = ClientOption::MetaContext {
            name: b"",
            queries: vec![b"base:"],
            selects: false,
        };
        assert_eq!(parse(OPT_LIST_META_CONTEXT, data), Ok(parsed));
        for length in 0..data.len() {
            assert_eq!(parse(OPT_SET_META_CONTEXT, &data[..length]), Err(TOO_SHORT));
        }
        // A count of 4 billion ends with the data.
        let data = b"\0\0\0\0\xff\xff\xff\xff\0\0\0\0\0\0\0\0";
        assert_eq!(parse(OPT_SET_META_CONTEXT, data), Err(TOO_SHORT));
        let data = b"\0\0\x10\x01";
        assert!(parse(OPT_INFO, data).unwrap_err().contains("4096"));
        assert!(parse(OPT_LIST, b"x").is_err());
        assert_eq!(parse(5, b"tls"), Ok(ClientOption::Unknown));
    }
}
