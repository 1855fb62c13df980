//! The papers' names for where threads, buffers, cached pages and devices are.
//!
//! *Implications*, table I and II. In `TLORPLIR`, **T** is the transfer between device and memory (local or remote), **O** its direction (read), **P**
//! the processor that uses the data (local, remote, none) and **I** how (load). In `TRLCPR`, **TR** is the transfer and **CP** the copy between
//! the cached page and the program's buffer. *Jericho* has *proper* and *bad* (figure 13), and *best*, *native* and *worst* (figure 10).

use crate::error::{Error, Result};

/// Where the one side of an access is, seen from the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// On the same node.
    Local,
    /// On another node, the one with the greatest distance.
    Remote,
    /// Wherever the kernel puts it.
    Free,
}

/// What the processor does with the bytes of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Nothing. The thread runs on the buffer's node.
    None,
    /// It adds all bytes up, on this side of the buffer.
    Load(Side),
}

/// How a workload reaches its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Direct I/O: the transfer goes to the program's buffer.
    Direct,
    /// Through cached pages, from which the kernel or Jericho copies.
    Cached,
    /// Not at all: its data are in its own memory.
    Memory,
}

/// A placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The name of the papers.
    pub name: &'static str,
    /// The buffer or the cached page, seen from the device. For a placement that is no transfer of table I or II the device does not matter:
    /// `Local` is a node, each in turn.
    pub transfer: Side,
    /// The processor: with direct I/O seen from the buffer, else from the cached page.
    pub usage: Use,
    /// The workloads that it is for. `None`: all.
    pub only: Option<Way>,
    /// Whether only the papers' transfers with a device count, so that the node of the device must be known.
    pub needs_device_node: bool,
}

const fn transfers(name: &'static str, way: Way, transfer: Side, usage: Use) -> Placement {
    Placement {
        name,
        transfer,
        usage,
        only: Some(way),
        needs_device_node: true,
    }
}

const fn general(name: &'static str, memory: Side, usage: Side) -> Placement {
    Placement {
        name,
        transfer: memory,
        usage: Use::Load(usage),
        only: None,
        needs_device_node: false,
    }
}

use Side::{Free, Local, Remote};

/// All placements.
pub const PLACEMENTS: [Placement; 15] = [
    transfers("TRLCPL", Way::Cached, Local, Use::Load(Local)),
    transfers("TRRCPR", Way::Cached, Remote, Use::Load(Remote)),
    transfers("TRRCPL", Way::Cached, Remote, Use::Load(Local)),
    transfers("TRLCPR", Way::Cached, Local, Use::Load(Remote)),
    transfers("TLORPLIR", Way::Direct, Local, Use::Load(Local)),
    transfers("TLORPRIR", Way::Direct, Local, Use::Load(Remote)),
    transfers("TRORPLIR", Way::Direct, Remote, Use::Load(Local)),
    transfers("TRORPRIR", Way::Direct, Remote, Use::Load(Remote)),
    transfers("TLORP0I0", Way::Direct, Local, Use::None),
    transfers("TRORP0I0", Way::Direct, Remote, Use::None),
    general("proper", Local, Local),
    general("best", Local, Local),
    general("native", Free, Free),
    // The threads are far from the cached pages, and in figure 13 from their buffers.
    general("worst", Local, Remote),
    general("bad", Local, Remote),
];

impl Placement {
    /// Returns the placement with this name, in any case of letters. Fails with a message that lists the names.
    pub fn named(name: &str) -> Result<Placement> {
        let found = PLACEMENTS
            .iter()
            .find(|placement| placement.name.eq_ignore_ascii_case(name));
        found.copied().ok_or_else(|| {
            let names: Vec<&str> = PLACEMENTS.iter().map(|placement| placement.name).collect();
            Error::new(format!(
                "there is no placement {name}; the placements are {}",
                names.join(", ")
            ))
        })
    }

    /// Returns whether the name says that all transfers are reads (the *OR* of table I).
    pub fn reads_only(&self) -> bool {
        self.only == Some(Way::Direct)
    }

    /// Fails if the placement is not for workloads that reach their data in this way.
    pub fn check(&self, way: Way, workload: &str) -> Result<()> {
        if self.only.is_none_or(|only| only == way) {
            return Ok(());
        }
        let names = PLACEMENTS
            .iter()
            .filter(|one| one.only.is_none_or(|only| only == way));
        let names: Vec<&str> = names.map(|one| one.name).collect();
        Err(Error::new(format!(
            "the placement {} is not for {workload}, which uses {}; use one of {}",
            self.name,
            match way {
                Way::Direct => "direct I/O",
                Way::Cached => "cached pages",
                Way::Memory => "memory only",
            },
            names.join(", ")
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_transfers_say_where_things_are() {
        for placement in PLACEMENTS {
            let (transfer, usage) = match placement.only {
                // TxORPxIx
                Some(Way::Direct) => (&placement.name[1..2], &placement.name[5..6]),
                // TRxCPx
                Some(Way::Cached) => (&placement.name[2..3], &placement.name[5..6]),
                Some(Way::Memory) | None => continue,
            };
            let side = |letter| match letter {
                "L" => Local,
                _ => Remote,
            };
            assert_eq!(placement.transfer, side(transfer), "{}", placement.name);
            let expected = match usage {
                "0" => Use::None,
                letter => Use::Load(side(letter)),
            };
            assert_eq!(placement.usage, expected, "{}", placement.name);
        }
    }

    #[test]
    fn a_wrong_name_or_way_gets_a_message_with_the_right_ones() {
        let wrong = Placement::named("TRXCPX").unwrap_err().to_string();
        assert!(
            wrong.contains("TRLCPL") && wrong.contains("native"),
            "{wrong}"
        );
        let cached = Placement::named("trlcpl").unwrap();
        assert_eq!(cached.name, "TRLCPL");
        let refused = cached.check(Way::Direct, "zmio").unwrap_err().to_string();
        assert!(
            refused.contains("TLORPLIR") && !refused.contains("TRRCPL,"),
            "{refused}"
        );
        cached.check(Way::Cached, "scan").unwrap();
    }
}
