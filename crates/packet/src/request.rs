//! What the program is asked for: its three arguments.

use std::ffi::OsString;
use std::ops::RangeInclusive;

/// Sizes of a receive buffer that the program gives. The kernel's limit, net.core.rmem_max, is less on most hosts.
const RECEIVE_BYTES: RangeInclusive<usize> = 4096..=64 << 20;
/// Smaller numbers are lengths (IEEE 802.3), and names of the kernel for all frames.
const ETHERTYPE_MIN: u16 = 0x600;
/// Ethertypes whose frames carry what other programs of the host say to others.
const REFUSED: [(u16, &str); 11] = [
    (0x0800, "IP"),
    (0x0806, "ARP"),
    (0x86dd, "IPv6"),
    (0x8100, "VLANs"),
    (0x88a8, "VLANs"),
    (0x9100, "VLANs"),
    (0x8847, "MPLS"),
    (0x8848, "MPLS"),
    (0x8863, "PPP"),
    (0x8864, "PPP"),
    (0x888e, "logins to the network"),
];

/// A socket that a user wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Name of the interface.
    pub interface: String,
    /// Ethertype of the frames to receive.
    pub ethertype: u16,
    /// Size of the receive buffer.
    pub receive_bytes: usize,
}

/// Why the program opens no such socket for anybody.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// Not three arguments.
    #[error("expected three arguments: interface, Ethertype and size of the receive buffer")]
    Count,
    /// No possible name.
    #[error(
        "no possible name of a network interface: expected 1 to 15 visible ASCII characters, and neither / nor :"
    )]
    Interface,
    /// No number, or one that is no Ethertype.
    #[error("no possible Ethertype: expected a decimal number from 1536 (0x600) to 65535")]
    Ethertype,
    /// A protocol of others.
    #[error(
        "the Ethertype {number:#06x} belongs to {protocol}; choose another one with --ethertype, such as 0x88b5"
    )]
    Refused {
        /// The Ethertype.
        number: u16,
        /// Whose it is.
        protocol: &'static str,
    },
    /// No number, or a wrong one.
    #[error("no possible size of a receive buffer: expected 4096 to 67108864 bytes")]
    Size,
}

impl Request {
    /// Checks arguments.
    pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Request, RequestError> {
        let mut arguments = arguments.into_iter().map(OsString::into_string);
        let (three, rest) = ([(); 3].map(|()| arguments.next()), arguments.next());
        let ([Some(interface), Some(ethertype), Some(bytes)], None) = (three, rest) else {
            return Err(RequestError::Count);
        };
        let interface = interface.ok().filter(|name| is_name(name));
        let ethertype = ethertype.ok().and_then(|text| number(&text));
        let ethertype = ethertype.and_then(|number| u16::try_from(number).ok());
        let ethertype = ethertype.filter(|number| *number >= ETHERTYPE_MIN);
        let bytes = bytes.ok().and_then(|text| number(&text));
        let request = Request {
            interface: interface.ok_or(RequestError::Interface)?,
            ethertype: ethertype.ok_or(RequestError::Ethertype)?,
            receive_bytes: bytes
                .filter(|bytes| RECEIVE_BYTES.contains(bytes))
                .ok_or(RequestError::Size)?,
        };
        match REFUSED.iter().find(|(one, _)| *one == request.ethertype) {
            Some(&(number, protocol)) => Err(RequestError::Refused { number, protocol }),
            None => Ok(request),
        }
    }

    /// Returns the arguments of the request.
    pub fn arguments(&self) -> [String; 3] {
        [
            self.interface.clone(),
            self.ethertype.to_string(),
            self.receive_bytes.to_string(),
        ]
    }
}

/// Returns whether the kernel takes such a name, and it can be printed.
fn is_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_graphic() && byte != b'/' && byte != b':';
    (1..=15).contains(&name.len()) && name.bytes().all(is_plain) && name != "." && name != ".."
}

/// Reads a decimal number. Takes digits only: no sign.
fn number(text: &str) -> Option<usize> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit());
    is_plain.then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStringExt;

    fn parse(arguments: &[&str]) -> Result<Request, RequestError> {
        Request::parse(arguments.iter().map(OsString::from))
    }

    #[test]
    fn a_request_passes_through_its_arguments() {
        let request = Request {
            interface: "eth0.7".into(),
            ethertype: 0x88b5,
            receive_bytes: 8 << 20,
        };
        let arguments = request.arguments().map(OsString::from);
        assert_eq!(Request::parse(arguments), Ok(request));
    }

    #[test]
    fn other_names_numbers_and_counts_are_refused() {
        use RequestError::{Count, Ethertype, Interface, Size};
        for (arguments, expected) in [
            (["eth0", "34997", ""], Size),
            (["eth0", "34997", "4095"], Size),
            (["eth0", "34997", "67108865"], Size),
            (["eth0", "34997", "99999999999999999999999999"], Size),
            (["eth0", "34997", "+8192"], Size),
            (["eth0", "0x88b5", "8192"], Ethertype),
            (["eth0", "-1", "8192"], Ethertype),
            (["eth0", "", "8192"], Ethertype),
            (["eth0", "0", "8192"], Ethertype),
            // ETH_P_ALL.
            (["eth0", "3", "8192"], Ethertype),
            (["eth0", "1535", "8192"], Ethertype),
            (["eth0", "65539", "8192"], Ethertype),
            (["", "34997", "8192"], Interface),
            (["..", "34997", "8192"], Interface),
            (["../eth0", "34997", "8192"], Interface),
            (["eth0:1", "34997", "8192"], Interface),
            (["eth 0", "34997", "8192"], Interface),
            (["eth0\n", "34997", "8192"], Interface),
            (["é", "34997", "8192"], Interface),
            (["abcdefghijklmnop", "34997", "8192"], Interface),
        ] {
            assert_eq!(parse(&arguments), Err(expected), "{arguments:?}");
        }
        assert_eq!(parse(&[]), Err(Count));
        assert_eq!(parse(&["eth0", "34997"]), Err(Count));
        assert_eq!(parse(&["eth0", "34997", "8192", "x"]), Err(Count));
        let broken = ["eth0", "34997", "8192"].map(OsString::from);
        let broken = [OsString::from_vec(vec![0xff])]
            .into_iter()
            .chain(broken.into_iter().skip(1));
        assert_eq!(Request::parse(broken), Err(Interface));
    }

    #[test]
    fn ethertypes_of_others_are_refused() {
        for number in [0x0800, 0x0806, 0x86dd, 0x8100, 0x88a8] {
            let text = u16::to_string(&number);
            let error = parse(&["eth0", &text, "8192"]).unwrap_err();
            let expected = format!("{number:#06x}");
            assert!(error.to_string().contains(&expected), "{error}");
        }
        assert!(parse(&["eth0", "1536", "8192"]).is_ok());
        assert!(parse(&["eth0", "65535", "67108864"]).is_ok());
    }
}
