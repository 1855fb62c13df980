//! An initiator and a target that exchange frames, and get forged ones in between, with right checksums where the input says so.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use jericho_format::wire::{FrameHeader, HEADER_BYTES, TRANSFER_BYTES_MAX};
use jericho_remote::{
    Action, Body, Client, Entropy, ExportConfig, Frame, Initiator, InitiatorConfig,
    InitiatorOutput, Key, Link, Operation, Scheduler, Seal, Security, Target, TargetConfig,
    TargetOutput, Work, WorkError,
};
use zerocopy::{FromBytes, IntoBytes};

use crate::input::Input;

const PAGE: usize = 4096;
const POOL_PAGES: u32 = 256;
/// Frames that a forged one may be made from: the latest ones.
const KEPT: usize = 32;
/// More frames than a pair of hosts sends between two inputs.
const ROUNDS: usize = 10_000;

struct Pair {
    time: Duration,
    initiator: Initiator,
    target: Target,
    /// Frames under way: to the target?, bytes, salt.
    flying: VecDeque<(bool, Vec<u8>, u32)>,
    kept: VecDeque<(bool, Vec<u8>, u32)>,
    works: Vec<Work>,
    /// Length of each request that has not ended.
    requests: HashMap<u64, u32>,
    pools: HashMap<u64, u32>,
    tags: u64,
    /// Stands for the pools of both: the bytes of frames do not matter here.
    pool: Vec<u8>,
}

fn entropy(seed: u64) -> Entropy {
    let mut state = seed;
    Box::new(move || {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
        state ^ state >> 29
    })
}

impl Pair {
    fn new(security: Security) -> Pair {
        let link = |end| Link {
            mac: [2, 0, 0, 0, 0, end],
            mtu: 9000,
            credit: 64,
            node: None,
            nic: 0,
        };
        let config = InitiatorConfig {
            host: String::new(),
            export: "data".into(),
            client: [1; 16],
            ethertype: 0x88B5,
            take_over: false,
            replay: true,
            pool_pages: POOL_PAGES,
            dead_after: Some(Duration::from_secs(20)),
            scheduler: Scheduler::Affinity,
            batches: true,
            key: (security != Security::None).then(|| Key::new([7; 32])),
            frames_per_key: 1024,
        };
        let export = ExportConfig {
            name: "data".into(),
            size_bytes: 64 << 20,
            is_read_only: false,
            is_hidden: false,
            last_owner: None,
            security,
            clients: vec![Client {
                id: "client".into(),
                key: Key::new([7; 32]),
            }],
        };
        let target_config = TargetConfig {
            host: "hostb".into(),
            ethertype: 0x88B5,
            slots: 8,
            pool_pages: POOL_PAGES,
            frames_per_key: 1024,
        };
        let time = Duration::from_secs(100);
        let initiator = Initiator::new(config, &[link(1)], entropy(1), time);
        let target = Target::new(target_config, &[link(2)], vec![export], entropy(2));
        Pair {
            time,
            initiator: initiator.expect("an initiator"),
            target: target.expect("a target"),
            flying: VecDeque::new(),
            kept: VecDeque::new(),
            works: Vec::new(),
            requests: HashMap::new(),
            pools: HashMap::new(),
            tags: 0,
            pool: vec![0; POOL_PAGES as usize * PAGE],
        }
    }

    fn send(&mut self, to_target: bool, frame: &Frame) {
        if let Body::Pool {
            offset_bytes,
            length_bytes,
            ..
        } = frame.body
        {
            assert!(offset_bytes + u64::from(length_bytes) <= self.pool.len() as u64);
        }
        let salt = match frame.seal {
            Seal::Checksum(salt) => salt,
            Seal::Key(_) => 0,
        };
        let sent = (to_target, frame.to_bytes(&self.pool), salt);
        self.kept.push_back(sent.clone());
        while self.kept.len() > KEPT {
            self.kept.pop_front();
        }
        self.flying.push_back(sent);
    }

    /// Performs the outputs of both.
    fn settle(&mut self) {
        self.initiator.poll(self.time);
        while let Some(output) = self.initiator.next_output() {
            match output {
                InitiatorOutput::Send(frame) => self.send(true, &frame),
                InitiatorOutput::Fill { tag, run } => {
                    let length = self.requests[&tag];
                    assert_eq!(run.pages as usize * PAGE, length as usize);
                    assert!(run.page + run.pages <= POOL_PAGES);
                }
                InitiatorOutput::Done { tag, .. } => {
                    assert!(self.requests.remove(&tag).is_some(), "it ended twice");
                }
                InitiatorOutput::Attached(_)
                | InitiatorOutput::Replay { .. }
                | InitiatorOutput::Reachable(_)
                | InitiatorOutput::Hint(_)
                | InitiatorOutput::Ended(_) => {}
            }
        }
        self.target.poll(self.time);
        while let Some(output) = self.target.next_output() {
            match output {
                TargetOutput::Send(frame) => self.send(false, &frame),
                TargetOutput::Stranger { .. } => {}
                TargetOutput::OpenPool { session, pages, .. } => {
                    self.pools.insert(session, pages);
                }
                TargetOutput::ClosePool { session } => {
                    assert!(self.pools.remove(&session).is_some());
                }
                TargetOutput::Execute(work) => {
                    if let Work::Request {
                        session,
                        operation,
                        run,
                        ..
                    } = work
                    {
                        assert!(operation.range().end <= 64 << 20);
                        assert!(run.pages == 0 || run.page + run.pages <= self.pools[&session]);
                    }
                    self.works.push(work);
                }
                TargetOutput::RecordOwner { export, owner } => {
                    if owner.is_attached {
                        self.target.owner_recorded(self.time, export);
                    }
                }
            }
        }
    }

    fn deliver(&mut self, to_target: bool, frame: &[u8]) {
        let frame = &mut frame.to_vec();
        if to_target {
            if let Some((place, payload)) = self.target.on_frame(self.time, 0, frame) {
                let pages = u64::from(self.pools[&place.session]);
                assert!(place.at_bytes + payload.len() as u64 <= pages * PAGE as u64);
            }
        } else if let Some((place, payload)) = self.initiator.on_frame(self.time, 0, frame) {
            let length = self.requests.get(&place.tag).copied();
            // The last part of a read ends the request before its bytes are copied.
            let length = length.unwrap_or(TRANSFER_BYTES_MAX);
            assert!(u64::from(place.at_bytes) + payload.len() as u64 <= length.into());
        }
        self.settle();
    }

    /// Carries frames until none is under way.
    fn carry(&mut self) {
        for _ in 0..ROUNDS {
            let Some((to_target, frame, _)) = self.flying.pop_front() else {
                return;
            };
            self.deliver(to_target, &frame);
        }
    }

    fn submit(&mut self, input: &mut Input<'_>) {
        self.tags += 1;
        let is_durable = input.number(1) & 1 == 1;
        let action = match input.number(1) % 5 {
            0 => Action::Read,
            1 => Action::Write { is_durable },
            2 => Action::WriteZeroes { is_durable },
            3 => Action::Discard,
            _ => Action::Flush,
        };
        let operation = match action {
            Action::Flush => Operation::flush(),
            action => Operation {
                action,
                offset_bytes: input.number(2) * PAGE as u64,
                length_bytes: (1 + input.below(256)) as u32 * PAGE as u32,
            },
        };
        self.requests.insert(self.tags, operation.length_bytes);
        self.initiator.submit(self.time, self.tags, operation, None);
        self.settle();
    }
}

/// Lets an input disturb an initiator and a target.
pub fn wire(data: &[u8]) {
    let mut input = Input(data);
    let mut pair = Pair::new(match input.number(1) % 3 {
        0 => Security::None,
        1 => Security::Mac,
        _ => Security::Encrypt,
    });
    pair.settle();
    pair.carry();
    while !input.is_empty() {
        match input.number(1) % 8 {
            0 => pair.carry(),
            1 => {
                let to_target = input.number(1) & 1 == 1;
                let length = input.below(200);
                let frame = input.take(length).to_vec();
                pair.deliver(to_target, &frame);
            }
            2..=4 => forge(&mut pair, &mut input),
            5 => pair.submit(&mut input),
            6 => {
                pair.time += Duration::from_micros(1 << (input.number(1) % 26));
                pair.settle();
                // Frames that are under way may be lost.
                if input.number(1) & 1 == 1 {
                    pair.flying.clear();
                }
            }
            _ => {
                let result = match input.number(1) % 4 {
                    0 => Err(WorkError {
                        errno: input.number(2) as u16,
                        loses_writes: input.number(1) & 1 == 1,
                    }),
                    _ => Ok(()),
                };
                for work in std::mem::take(&mut pair.works) {
                    pair.target.ended(work, result);
                }
                pair.settle();
            }
        }
    }
    assert!(pair.target.sessions() < 4);
}

/// Delivers a copy of a frame with some bytes changed.
fn forge(pair: &mut Pair, input: &mut Input<'_>) {
    let at = input.below(pair.kept.len());
    let Some((to_target, mut frame, salt)) = pair.kept.get(at).cloned() else {
        return;
    };
    for _ in 0..1 + input.below(4) {
        let at = 12 + input.below(frame.len().min(HEADER_BYTES + 192) - 12);
        let count = 1 + input.below(8);
        let new = input.take(count);
        let count = new.len().min(frame.len() - at);
        frame[at..at + count].copy_from_slice(&new[..count]);
    }
    if input.number(1) & 3 != 0
        && let Ok((mut header, payload)) = FrameHeader::read_from_prefix(&frame)
        && let Some(payload) = payload.get(..header.payload_bytes.get().into())
    {
        header.seal(salt, payload);
        frame[..HEADER_BYTES].copy_from_slice(header.as_bytes());
    }
    pair.deliver(to_target, &frame);
}
