//! The messages around shared memory: the ioctl on an fd, and the handshake that sends the segments. Native-endian, because both
//! sides run on one machine.

/// Version of the protocol in `docs/formats/shm.md`.
pub const PROTOCOL: u32 = 2;
/// Bytes of the ioctl's argument, in and out.
pub const CALL_BYTES: usize = 64;
/// Bytes of a request and of a reply of the handshake.
pub const HANDSHAKE_BYTES: usize = 32;

const HANDSHAKE_MAGIC: u64 = u64::from_ne_bytes(*b"JRCHhand");
const NR_FAST: u32 = 1;
/// Flags of a call.
const WRITE: u32 = 1;
const SOON: u32 = 2;
const ALWAYS: u32 = 1;

/// A thread of a client, by the block that it has for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientThread {
    /// The client's owner number. Not 0.
    pub owner: u16,
    /// The block's number in the client's area.
    pub block: u32,
    /// The daemon instance that assigned the owner number.
    pub instance: u64,
}

/// A program's request about an open file, by ioctl.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Asks for inline reads (and, with `write`, writes) of this open file.
    Fast {
        /// The program asks for inline writes, too.
        write: bool,
        /// The calling thread, if it may leave wishes.
        thread: Option<ClientThread>,
    },
    /// Asks the daemon to read pages ahead.
    ReadAhead {
        /// First page.
        first: u64,
        /// Number of pages.
        pages: u32,
    },
    /// Asks the daemon to reserve space for pages at or beyond the end, and to put them into the cache.
    Reserve {
        /// First page.
        first: u64,
        /// Number of pages.
        pages: u32,
        /// The daemon answers before it has reserved them.
        soon: bool,
    },
    /// The file is about to be mapped: the daemon ends inline access and makes the page cache coherent.
    Mapped,
    /// Asks for a token, which proves that the caller has a writable fd.
    Token,
    /// A signal handler interrupted an inline write of its thread and is about to access these pages through the kernel. If
    /// the client has latched some of them, the daemon moves those to other frames.
    Interrupted {
        /// First page.
        first: u64,
        /// Number of pages.
        pages: u32,
        /// The client's owner number.
        owner: u16,
        /// The daemon instance that assigned the number.
        instance: u64,
    },
    /// A writer that lost its latch has ended its copy into the page's former frame.
    Copied {
        /// The slice's number.
        slice: u16,
        /// The frame.
        frame: u32,
        /// The client's owner number.
        owner: u16,
        /// The daemon instance that assigned the number.
        instance: u64,
    },
    /// The calling thread works on the node of its data: the daemon moves its companions there.
    Companions {
        /// The node.
        node: u16,
        /// The thread's policy is *always*.
        always: bool,
        /// The client's owner number.
        owner: u16,
        /// The daemon instance that assigned the number.
        instance: u64,
    },
}

/// The answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// 0: done; otherwise the number of a `Refusal`.
    pub status: u32,
    /// Slot of the file.
    pub slot: u32,
    /// The slot's generation.
    pub generation: u32,
    /// Number of pages that are reserved, or that are still latched.
    pub pages: u32,
    /// The daemon's instance number.
    pub instance: u64,
    /// The object.
    pub object: u64,
    /// Token that a request for writable segments must present; 0: none.
    pub token: u64,
}

/// Why an open file takes the kernel path, or a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Refusal {
    /// The protocol's version differs.
    Version = 1,
    /// The caller's user is not trusted with the volume's cache.
    Owner = 2,
    /// The file has set-id bits, which each write must clear.
    SetId = 3,
    /// The file is mapped somewhere.
    Mapped = 4,
    /// The mount or the open file is read-only.
    ReadOnly = 5,
    /// Too many files are open inline.
    Slots = 6,
    /// The volume has no space, or the slice no frames, to reserve the pages.
    Space = 7,
    /// The fast path is switched off, or the daemon closes.
    Off = 8,
    /// The daemon is reserving the pages for another writer now: a later request may succeed.
    Busy = 9,
    /// The mount moves no companions of threads.
    Companions = 10,
}

fn u32_at(bytes: &[u8; CALL_BYTES], at: usize) -> u32 {
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8; CALL_BYTES], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_ne_bytes(word)
}

/// `_IOWR('J', n, 64 bytes)`.
const fn number(n: u32) -> u32 {
    3 << 30 | (CALL_BYTES as u32) << 16 | (b'J' as u32) << 8 | n
}

impl Call {
    /// Returns the ioctl's number and argument.
    pub fn encode(self) -> (u32, [u8; CALL_BYTES]) {
        let (n, flags, first, pages) = match self {
            Call::Fast { write, thread } => {
                let block = thread.map_or(0, |thread| thread.block);
                (NR_FAST, u32::from(write) * WRITE, 0, block)
            }
            Call::ReadAhead { first, pages } => (2, 0, first, pages),
            Call::Reserve { first, pages, soon } => (3, u32::from(soon) * SOON, first, pages),
            Call::Mapped => (4, 0, 0, 0),
            Call::Token => (5, 0, 0, 0),
            Call::Interrupted { first, pages, .. } => (6, 0, first, pages),
            Call::Copied { slice, frame, .. } => (7, 0, u64::from(slice), frame),
            Call::Companions { node, always, .. } => {
                (8, u32::from(always) * ALWAYS, u64::from(node), 0)
            }
        };
        let (owner, instance) = match self {
            Call::Interrupted {
                owner, instance, ..
            }
            | Call::Copied {
                owner, instance, ..
            }
            | Call::Companions {
                owner, instance, ..
            }
            | Call::Fast {
                thread:
                    Some(ClientThread {
                        owner, instance, ..
                    }),
                ..
            } => (u32::from(owner), instance),
            _ => (0, 0),
        };
        let mut bytes = [0; CALL_BYTES];
        bytes[0..4].copy_from_slice(&PROTOCOL.to_ne_bytes());
        bytes[4..8].copy_from_slice(&flags.to_ne_bytes());
        bytes[8..16].copy_from_slice(&first.to_ne_bytes());
        bytes[16..20].copy_from_slice(&pages.to_ne_bytes());
        bytes[20..24].copy_from_slice(&owner.to_ne_bytes());
        bytes[24..32].copy_from_slice(&instance.to_ne_bytes());
        (number(n), bytes)
    }

    /// Decodes an ioctl. Returns `Ok(None)` for another filesystem's ioctl. Fails for another version of the protocol.
    pub fn decode(number_given: u32, argument: &[u8]) -> Result<Option<Call>, Refusal> {
        let Some(n) = (1..=8).find(|n| number(*n) == number_given) else {
            return Ok(None);
        };
        let Ok(bytes) = <&[u8; CALL_BYTES]>::try_from(argument) else {
            return Ok(None);
        };
        if u32_at(bytes, 0) != PROTOCOL {
            return Err(Refusal::Version);
        }
        let (flags, first, pages) = (u32_at(bytes, 4), u64_at(bytes, 8), u32_at(bytes, 16));
        // An out-of-range number maps to one that no owner has.
        let owner = u16::try_from(u32_at(bytes, 20)).unwrap_or(0);
        let instance = u64_at(bytes, 24);
        Ok(Some(match n {
            NR_FAST => Call::Fast {
                write: flags & WRITE != 0,
                thread: (owner != 0).then_some(ClientThread {
                    owner,
                    block: pages,
                    instance,
                }),
            },
            2 => Call::ReadAhead { first, pages },
            3 => Call::Reserve {
                first,
                pages,
                soon: flags & SOON != 0,
            },
            4 => Call::Mapped,
            5 => Call::Token,
            6 => Call::Interrupted {
                first,
                pages,
                owner,
                instance,
            },
            7 => Call::Copied {
                slice: u16::try_from(first).unwrap_or(u16::MAX),
                frame: pages,
                owner,
                instance,
            },
            _ => Call::Companions {
                node: u16::try_from(first).unwrap_or(u16::MAX),
                always: flags & ALWAYS != 0,
                owner,
                instance,
            },
        }))
    }
}

impl Answer {
    /// Returns an answer that refuses.
    pub fn refused(why: Refusal) -> Answer {
        Answer {
            status: why as u32,
            ..Answer::default()
        }
    }

    /// Returns the answer's bytes.
    pub fn encode(self) -> [u8; CALL_BYTES] {
        let mut bytes = [0; CALL_BYTES];
        bytes[0..4].copy_from_slice(&self.status.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.slot.to_ne_bytes());
        bytes[8..12].copy_from_slice(&self.generation.to_ne_bytes());
        bytes[12..16].copy_from_slice(&self.pages.to_ne_bytes());
        bytes[16..24].copy_from_slice(&self.instance.to_ne_bytes());
        bytes[24..32].copy_from_slice(&self.object.to_ne_bytes());
        bytes[32..40].copy_from_slice(&self.token.to_ne_bytes());
        bytes
    }

    /// Decodes an answer.
    pub fn decode(bytes: &[u8; CALL_BYTES]) -> Answer {
        Answer {
            status: u32_at(bytes, 0),
            slot: u32_at(bytes, 4),
            generation: u32_at(bytes, 8),
            pages: u32_at(bytes, 12),
            instance: u64_at(bytes, 16),
            object: u64_at(bytes, 24),
            token: u64_at(bytes, 32),
        }
    }
}

/// Returns the name of the abstract socket of a daemon instance.
pub fn socket_name(instance: u64) -> String {
    format!("jericho-{instance:016x}")
}

/// A client's request for the segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// A token from the ioctl on a writable fd. It requests writable table, ages, frames and slots. 0 requests read-only
    /// segments.
    pub token: u64,
    /// The client's owner number if it already has one and asks for write access; 0: a new client.
    pub owner: u16,
}

/// The message that comes with the segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// 0, or the errno with which the daemon refuses.
    pub error: u32,
    /// The client's owner number.
    pub owner: u16,
    /// Number of slices. Each has three segments, after control, slots and area.
    pub slices: u16,
}

fn message(words: [u32; 4], token: u64) -> [u8; HANDSHAKE_BYTES] {
    let mut bytes = [0; HANDSHAKE_BYTES];
    bytes[0..8].copy_from_slice(&HANDSHAKE_MAGIC.to_ne_bytes());
    for (at, word) in words.iter().enumerate() {
        bytes[8 + 4 * at..12 + 4 * at].copy_from_slice(&word.to_ne_bytes());
    }
    bytes[24..32].copy_from_slice(&token.to_ne_bytes());
    bytes
}

fn words(bytes: &[u8]) -> Option<([u32; 4], u64)> {
    let bytes = <&[u8; HANDSHAKE_BYTES]>::try_from(bytes).ok()?;
    if bytes[0..8] != HANDSHAKE_MAGIC.to_ne_bytes() {
        return None;
    }
    let mut words = [0; 4];
    for (at, word) in words.iter_mut().enumerate() {
        let b = &bytes[8 + 4 * at..12 + 4 * at];
        *word = u32::from_ne_bytes([b[0], b[1], b[2], b[3]]);
    }
    let mut token = [0; 8];
    token.copy_from_slice(&bytes[24..32]);
    (words[0] == PROTOCOL).then_some((words, u64::from_ne_bytes(token)))
}

impl Request {
    /// Returns the request's bytes.
    pub fn encode(self) -> [u8; HANDSHAKE_BYTES] {
        message([PROTOCOL, 0, u32::from(self.owner), 0], self.token)
    }

    /// Decodes a request. Returns `None` for other bytes and for another version.
    pub fn decode(bytes: &[u8]) -> Option<Request> {
        let ([_, _, owner, _], token) = words(bytes)?;
        Some(Request {
            token,
            owner: u16::try_from(owner).ok()?,
        })
    }
}

impl Reply {
    /// Returns the reply's bytes.
    pub fn encode(self) -> [u8; HANDSHAKE_BYTES] {
        let (owner, slices) = (u32::from(self.owner), u32::from(self.slices));
        message([PROTOCOL, self.error, owner, slices], 0)
    }

    /// Decodes a reply. Returns `None` for other bytes and for another version.
    pub fn decode(bytes: &[u8]) -> Option<Reply> {
        let ([_, error, owner, slices], _) = words(bytes)?;
        Some(Reply {
            error,
            owner: u16::try_from(owner).ok()?,
            slices: u16::try_from(slices).ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_and_answers_decode_to_themselves() {
        for call in [
            Call::Fast {
                write: false,
                thread: None,
            },
            Call::Fast {
                write: true,
                thread: Some(ClientThread {
                    owner: 1023,
                    block: 1022,
                    instance: 1 << 50,
                }),
            },
            Call::ReadAhead { first: 7, pages: 9 },
            Call::Reserve {
                first: 1 << 33,
                pages: 1024,
                soon: false,
            },
            Call::Reserve {
                first: 0,
                pages: 1,
                soon: true,
            },
            Call::Mapped,
            Call::Token,
            Call::Interrupted {
                first: 1 << 33,
                pages: 3,
                owner: 1023,
                instance: u64::MAX,
            },
            Call::Copied {
                slice: 5,
                frame: 1 << 25,
                owner: 2,
                instance: 1,
            },
            Call::Companions {
                node: 3,
                always: true,
                owner: 2,
                instance: 1,
            },
        ] {
            let (number, bytes) = call.encode();
            assert_eq!(Call::decode(number, &bytes), Ok(Some(call)));
            assert_eq!(Call::decode(number ^ 1 << 8, &bytes), Ok(None));
            assert_eq!(Call::decode(number, &bytes[..63]), Ok(None));
            let mut newer = bytes;
            newer[0] += 1;
            assert_eq!(Call::decode(number, &newer), Err(Refusal::Version));
        }
        let answer = Answer {
            status: 1,
            slot: 2,
            generation: 3,
            pages: 4,
            instance: 5 << 40,
            object: 6 << 20,
            token: 7 << 60,
        };
        assert_eq!(Answer::decode(&answer.encode()), answer);
    }

    #[test]
    fn handshake_messages_decode_to_themselves_and_other_bytes_are_refused() {
        let request = Request {
            token: 1 << 63,
            owner: 1023,
        };
        assert_eq!(Request::decode(&request.encode()), Some(request));
        let reply = Reply {
            error: 13,
            owner: 2,
            slices: 1024,
        };
        assert_eq!(Reply::decode(&reply.encode()), Some(reply));
        assert_eq!(Request::decode(&[0; HANDSHAKE_BYTES]), None);
        assert_eq!(Request::decode(&request.encode()[..31]), None);
        let mut newer = request.encode();
        newer[8] += 1;
        assert_eq!(Request::decode(&newer), None);
    }
}
