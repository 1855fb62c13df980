//! One test for each promise of the keys. Section *Keys* of `docs/formats/wire.md` has the rules.

use std::time::Duration;

use jericho_format::wire::{
    ETHERNET_BYTES, FrameHeader, HEADER_BYTES, Handshake, Hello, Offer, Refused, frame_kind,
    reason, security,
};
use jericho_remote::{Action, Ended, Key, Security, UNREACHABLE};
use jericho_sim::Arrival;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::world::{Settings, World};

const WRITE: Action = Action::Write { is_durable: false };

fn world(security: Security) -> World {
    let settings = Settings {
        security,
        ..Settings::default()
    };
    let mut world = World::new(1, settings);
    world.sent = Some(Vec::new());
    world
}

fn ok(world: &mut World, host: usize, action: Action, block: usize, blocks: usize) {
    let tag = world.submit(host, action, block, blocks);
    assert_eq!(world.result(host, tag), Ok(()), "{action:?} of {block}");
}

/// Returns a world in which a host with a key has written and read.
fn used(security: Security) -> (World, usize) {
    let mut world = world(security);
    let host = world.start_host(1, false);
    ok(&mut world, host, WRITE, 0, 3);
    ok(&mut world, host, Action::Read, 0, 3);
    (world, host)
}

fn ended(world: &mut World, host: usize) -> Ended {
    world.run_until("the end of a host", |w| w.hosts[host].ended.is_some());
    world.hosts[host].ended.expect("it has ended")
}

fn sessions(world: &World) -> usize {
    world.target.as_ref().expect("a target").sessions()
}

fn sent_of(world: &World, kind: u8) -> Vec<Arrival> {
    let sent = world.sent.iter().flatten();
    let of_kind = sent.filter(|arrival| header(arrival).kind == kind);
    of_kind.cloned().collect()
}

fn header(arrival: &Arrival) -> FrameHeader {
    FrameHeader::read_from_prefix(&arrival.frame).unwrap().0
}

/// Returns a frame outside of a channel like another one, with a changed payload and a right checksum: everybody can make it.
fn forged(like: &Arrival, kind: u8, index: u32, payload: &[u8]) -> Arrival {
    let mut header = header(like);
    header.kind = kind;
    header.index = index.into();
    (header.number, header.ack_end, header.acks) = (0.into(), 0.into(), 0.into());
    header.payload_bytes = (payload.len() as u16).into();
    header.seal(0, payload);
    Arrival {
        link: like.link,
        to: like.to,
        frame: [header.as_bytes(), payload].concat(),
    }
}

#[test]
fn a_client_that_is_not_on_the_list_is_refused_and_leaves_no_state() {
    for key in [Key::new([99; 32]), Key::new([88; 32])] {
        let mut world = world(Security::Mac);
        world.next_key = Some(Some(key));
        let host = world.start_host(1, true);
        assert_eq!(ended(&mut world, host), Ended::NotAllowed);
        assert_eq!((sessions(&world), world.strangers), (0, 1));
        assert!(world.last_owner.is_none());
    }
}

#[test]
fn both_sides_have_keys_or_neither_has() {
    let mut with_keys = world(Security::Encrypt);
    with_keys.next_key = Some(None);
    let host = with_keys.start_host(1, false);
    assert_eq!(ended(&mut with_keys, host), Ended::NeedsKey);
    let mut without = world(Security::None);
    without.next_key = Some(Some(Key::new([1; 32])));
    let host = without.start_host(1, false);
    assert_eq!(ended(&mut without, host), Ended::NoKeys);
    assert_eq!((sessions(&with_keys), sessions(&without)), (0, 0));
}

/// A stranger who changes the offer cannot talk the two into less than the target demands.
#[test]
fn an_offer_that_promises_less_is_of_no_use() {
    let mut world = world(Security::Encrypt);
    world.catch = Some(|header, _| header.kind == frame_kind::OFFER);
    let host = world.start_host(1, false);
    world.run_until("an offer", |world| !world.caught.is_empty());
    world.catch = None;
    let offer = world.caught.remove(0);
    let (mut record, _) = Offer::read_from_prefix(&offer.frame[HEADER_BYTES..]).unwrap();
    record.security = security::MAC;
    let index = header(&offer).index.get();
    let forged = forged(&offer, frame_kind::OFFER, index, record.as_bytes());
    world.arrive(&forged);
    world.run_until("a refusal", |world| world.strangers > 0);
    assert_eq!(sessions(&world), 0);
    // The target's next offer is its own.
    ok(&mut world, host, WRITE, 0, 1);
    assert_eq!(world.hosts[host].ended, None);
}

/// Returns a frame with a changed record and a right checksum.
fn changed<R: FromBytes + IntoBytes + Immutable>(of: &Arrival, change: impl Fn(&mut R)) -> Arrival {
    let (mut record, rest) = R::read_from_prefix(&of.frame[HEADER_BYTES..]).unwrap();
    change(&mut record);
    let payload = [record.as_bytes(), rest].concat();
    let head = header(of);
    forged(of, head.kind, head.index.get(), &payload)
}

/// A stranger changes one frame after another while the initiator looks for its target again.
#[test]
fn a_handshake_or_accept_that_was_changed_ends_no_session() {
    let changes: [fn(&mut Handshake); 6] = [
        |record| record.flags = 7.into(),
        |record| record.version = 9,
        |record| record.payload_max = 5.into(),
        |record| record.payload_max = 1408.into(),
        |record| record.security = 2,
        |record| record.lane = 99.into(),
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let (mut world, host) = used(Security::Mac);
        world.kill_target(false);
        world.start_target();
        world.catch = Some(|header, _| header.kind == frame_kind::HANDSHAKE);
        let read = world.submit(host, Action::Read, 0, 3);
        world.run_until("a HANDSHAKE", |world| !world.caught.is_empty());
        let asked = world.caught.remove(0);
        world.arrive(&changed(&asked, change));
        world.run_for(Duration::from_millis(50));
        world.arrive(&asked);
        world.catch = None;
        assert_eq!(world.result(host, read), Ok(()), "{number}");
        ok(&mut world, host, WRITE, 0, 9);
        assert_eq!(world.hosts[host].ended, None, "{number}");
    }
    for length in [0, 64, 136, 1408, 4096] {
        let (mut world, host) = used(Security::Mac);
        world.kill_target(false);
        world.start_target();
        world.catch = Some(|header, _| header.kind == frame_kind::ACCEPT);
        let read = world.submit(host, Action::Read, 0, 3);
        world.run_until("an ACCEPT", |world| !world.caught.is_empty());
        let accept = world.caught.remove(0);
        let cut = &accept.frame[HEADER_BYTES..HEADER_BYTES + length];
        let index = header(&accept).index.get();
        world.arrive(&forged(&accept, frame_kind::ACCEPT, index, cut));
        world.catch = None;
        world.arrive(&accept);
        assert_eq!(world.result(host, read), Ok(()), "{length}");
        let start = world.time;
        ok(&mut world, host, WRITE, 0, 9);
        assert!(world.time - start < Duration::from_secs(1), "{length}");
        assert_eq!(world.hosts[host].ended, None, "{length}");
    }
}

/// Two targets share a client's key. A stranger gives the answers of one to a client of the other.
#[test]
fn a_client_is_not_led_to_another_host_with_its_key() {
    let mut world = world(Security::Mac);
    world.target_host = "hostc";
    world.start_target();
    world.catch = Some(|header, _| [frame_kind::HELLO, frame_kind::OFFER].contains(&header.kind));
    let host = world.start_host(1, false);
    world.run_until("a HELLO", |world| !world.caught.is_empty());
    let name = |text: &str| {
        let mut name = [0; 64];
        name[..text.len()].copy_from_slice(text.as_bytes());
        name
    };
    let hello = world.caught.remove(0);
    world.arrive(&changed(&hello, |record: &mut Hello| {
        record.host = name("hostc")
    }));
    world.run_until("an OFFER", |world| {
        world
            .caught
            .iter()
            .any(|one| header(one).kind == frame_kind::OFFER)
    });
    let offer = world.caught.pop().unwrap();
    world.arrive(&changed(&offer, |record: &mut Offer| {
        record.host = name("hostb")
    }));
    world.run_until("a refusal", |world| world.strangers > 0);
    assert_eq!(ended(&mut world, host), Ended::NotAllowed);
    assert_eq!(sessions(&world), 0);
}

/// The HANDSHAKE of an attempt that was given up arrives when another channel works.
#[test]
fn a_handshake_that_was_held_up_does_not_end_the_channel_that_it_would_replace() {
    let (mut world, host) = used(Security::Mac);
    let newest = sent_of(&world, frame_kind::ACCEPT).pop().unwrap();
    let own_index = header(&newest).index.get();
    world.catch = Some(|header, _| {
        [
            frame_kind::PING,
            frame_kind::REQUESTS,
            frame_kind::HANDSHAKE,
        ]
        .contains(&header.kind)
    });
    let read = world.submit(host, Action::Read, 0, 3);
    let is_handshake = |arrival: &Arrival| header(arrival).kind == frame_kind::HANDSHAKE;
    world.run_until("a HANDSHAKE", |world| world.caught.iter().any(is_handshake));
    let held = world.caught.iter().find(|one| is_handshake(one)).cloned();
    let held = held.unwrap();
    let (record, _) = Handshake::read_from_prefix(&held.frame[HEADER_BYTES..]).unwrap();
    assert_eq!(record.replaces, own_index);
    // The PINGs of the old channel get through first.
    world.catch = Some(|header, _| header.kind == frame_kind::HANDSHAKE);
    assert_eq!(world.result(host, read), Ok(()));
    world.catch = None;
    let quiet = work_time(&mut world, host);
    let handshakes = sent_of(&world, frame_kind::HANDSHAKE).len();
    world.arrive(&held);
    world.run_for(Duration::from_millis(1));
    let after = work_time(&mut world, host);
    assert!(after < quiet * 3 / 2, "{after:?} and {quiet:?}");
    world.run_for(Duration::from_secs(2));
    // The target knows the channel.
    assert_eq!(sent_of(&world, frame_kind::HANDSHAKE).len(), handshakes);
}

/// Copies of frames are no answers.
#[test]
fn copies_of_old_frames_do_not_keep_a_dead_target_alive() {
    let settings = Settings {
        security: Security::Mac,
        dead_after: Some(Duration::from_secs(20)),
        ..Settings::default()
    };
    let mut world = World::new(1, settings);
    world.sent = Some(Vec::new());
    let host = world.start_host(1, false);
    ok(&mut world, host, WRITE, 0, 3);
    let copy = sent_of(&world, frame_kind::COMPLETIONS).remove(0);
    world.kill_target(false);
    let read = world.submit(host, Action::Read, 0, 3);
    for _ in 0..4 {
        world.run_for(Duration::from_secs(6));
        world.arrive(&copy);
    }
    assert_eq!(
        world.hosts[host].results.get(&read),
        Some(&Err(UNREACHABLE))
    );
}

/// A target that was restarted says that it knows no channel. Its clients come back as fast as without keys.
#[test]
fn clients_come_back_to_a_restarted_target_at_once() {
    for (requests, blocks) in [(1, 1), (16, 48)] {
        let times = [Security::None, Security::Mac].map(|security| {
            let (mut world, host) = used(security);
            for _ in 0..requests {
                world.submit(host, WRITE, 0, blocks);
            }
            world.kill_target(false);
            world.start_target();
            let start = world.time;
            world.run_until("all requests", |world| world.in_progress(host) == 0);
            world.time - start
        });
        let limit = times[0] * 2 + Duration::from_millis(2);
        assert!(times[1] < limit, "{requests}: {times:?}");
    }
}

#[test]
fn contents_are_visible_unless_they_are_encrypted() {
    for (security, is_visible) in [(Security::Mac, true), (Security::Encrypt, false)] {
        let (world, _) = used(security);
        let data = sent_of(&world, frame_kind::DATA);
        assert!(data.len() >= 4);
        // The oracle numbers the words of a block in their first two bytes, and the block in the next two.
        let shows = |arrival: &Arrival| {
            let words = arrival.frame[HEADER_BYTES..HEADER_BYTES + 4096].chunks(8);
            (0_u16..)
                .zip(words)
                .all(|(number, word)| word[..2] == number.to_le_bytes())
        };
        assert!(
            data.iter().all(|arrival| shows(arrival) == is_visible),
            "{security:?}"
        );
    }
}

#[test]
fn no_bit_of_a_frame_can_be_changed() {
    for security in [Security::Mac, Security::Encrypt] {
        let (mut world, host) = used(security);
        world.catch = Some(|header, _| header.kind == frame_kind::DATA);
        let write = world.submit(host, WRITE, 0, 1);
        world.run_until("the data", |world| !world.caught.is_empty());
        world.catch = None;
        let data = world.caught.remove(0);
        for at in (ETHERNET_BYTES..data.frame.len()).step_by(13).chain(
            ETHERNET_BYTES..HEADER_BYTES, // each byte of the header
        ) {
            let mut changed = data.clone();
            changed.frame[at] ^= 0x40;
            world.arrive(&changed);
        }
        world.arrive(&data);
        assert_eq!(world.result(host, write), Ok(()));
        ok(&mut world, host, Action::Read, 0, 3);
        assert_eq!(world.hosts[host].ended, None);
    }
}

/// Everything that was ever sent arrives again, at both sides, in sessions with the same keys.
#[test]
fn frames_that_are_sent_again_by_a_stranger_do_nothing() {
    for security in [Security::Mac, Security::Encrypt] {
        let (mut world, host) = used(security);
        world.kill_target(true);
        world.start_target();
        ok(&mut world, host, WRITE, 1, 1);
        let all = world.sent.take().unwrap();
        for arrival in &all {
            world.arrive(arrival);
        }
        world.run_for(Duration::from_secs(1));
        ok(&mut world, host, Action::Read, 0, 3);
        // The client's next process begins a session of its own.
        world.kill_host(host);
        let next = world.start_host(1, false);
        ok(&mut world, next, WRITE, 2, 1);
        for arrival in &all {
            world.arrive(arrival);
        }
        world.run_for(Duration::from_secs(1));
        ok(&mut world, next, Action::Read, 0, 3);
        assert_eq!(world.hosts[next].ended, None);
    }
}

/// Who repeats a HANDSHAKE can make the target open a channel. Nothing is sent there until somebody with its keys has sent a frame.
#[test]
fn a_handshake_that_is_repeated_takes_nothing_from_the_working_channel() {
    let (mut world, host) = used(Security::Mac);
    let handshake = sent_of(&world, frame_kind::HANDSHAKE).remove(0);
    // The initiator has got another channel since.
    world.catch = Some(|header, _| [frame_kind::PING, frame_kind::REQUESTS].contains(&header.kind));
    let read = world.submit(host, Action::Read, 0, 3);
    world.run_until("a HANDSHAKE", |world| {
        sent_of(world, frame_kind::HANDSHAKE).len() > 1
    });
    world.catch = None;
    assert_eq!(world.result(host, read), Ok(()));
    let index = |arrival: &Arrival| {
        let (record, _) = Handshake::read_from_prefix(&arrival.frame[HEADER_BYTES..]).unwrap();
        record.index.get()
    };
    let newest = sent_of(&world, frame_kind::HANDSHAKE).pop().unwrap();
    assert_ne!(index(&handshake), index(&newest));
    let quiet = work_time(&mut world, host);
    // A changed one, and the same one.
    let (mut smaller, _) = Handshake::read_from_prefix(&newest.frame[HEADER_BYTES..]).unwrap();
    smaller.payload_max = 1408.into();
    let smaller = forged(&newest, frame_kind::HANDSHAKE, 0, smaller.as_bytes());
    for arrival in [&handshake, &newest, &smaller] {
        world.arrive(arrival);
    }
    let stalls = work_time(&mut world, host);
    // The initiator would send a frame on an unknown channel again after a millisecond.
    assert!(stalls < quiet * 3 / 2, "{stalls:?} and {quiet:?}");
}

/// Returns the time that some requests take.
fn work_time(world: &mut World, host: usize) -> Duration {
    let start = world.time;
    for _ in 0..5 {
        ok(world, host, WRITE, 0, 3);
        ok(world, host, Action::Read, 0, 3);
    }
    world.time - start
}

/// Frames outside of a channel have no tag, or one that only the target can make.
#[test]
fn answers_of_a_stranger_end_nothing() {
    let (mut world, host) = used(Security::Mac);
    let offer = sent_of(&world, frame_kind::OFFER).remove(0);
    let own = sent_of(&world, frame_kind::REQUESTS).remove(0);
    let handshakes = sent_of(&world, frame_kind::HANDSHAKE).len();
    let refusal = |reason, index| Refused::new(reason, index).as_bytes().to_vec();
    // The working channel stays until another one takes its place, which happens once a second at most.
    let target_index = header(&own).index.get();
    let unknown = refusal(reason::UNKNOWN_INDEX, target_index);
    for _ in 0..100 {
        world.arrive(&forged(&offer, frame_kind::REFUSED, 0, &unknown));
        let channels = world.hosts[host].initiator.channels();
        assert!(channels[0].is_some_and(|channel| channel.is_up));
        ok(&mut world, host, Action::Read, 0, 3);
    }
    assert!(sent_of(&world, frame_kind::HANDSHAKE).len() <= handshakes + 1);
    let lost = world.hosts[host].initiator.channels();
    assert_eq!(lost[0].map(|one| one.lost), Some(0));
    // CLOSE in its name.
    let close = forged(&offer, frame_kind::CLOSE, 0, &refusal(reason::FENCED, 0));
    world.arrive(&close);
    ok(&mut world, host, Action::Read, 0, 3);
    // While the initiator looks for the target again.
    world.kill_target(true);
    let read = world.submit(host, Action::Read, 0, 3);
    world.catch = Some(|header, _| header.kind == frame_kind::HANDSHAKE);
    world.start_target();
    world.run_until("a HANDSHAKE", |world| !world.caught.is_empty());
    let asked = world.caught.remove(0);
    let (record, _) = Handshake::read_from_prefix(&asked.frame[HEADER_BYTES..]).unwrap();
    for reason in 0..12 {
        let index = record.index.get();
        for length in [0, 16] {
            let mut payload = refusal(reason, index);
            payload.resize(payload.len() + length, 0);
            world.arrive(&forged(&offer, frame_kind::REFUSED, index, &payload));
        }
    }
    for (version, security) in [(0, security::MAC), (1, security::NONE), (1, 77)] {
        let (mut record, _) = Offer::read_from_prefix(&offer.frame[HEADER_BYTES..]).unwrap();
        (record.version, record.security) = (version, security);
        let hello = header(&sent_of(&world, frame_kind::OFFER).pop().unwrap()).index;
        world.arrive(&forged(
            &offer,
            frame_kind::OFFER,
            hello.get(),
            record.as_bytes(),
        ));
    }
    world.catch = None;
    assert_eq!(world.result(host, read), Ok(()));
    assert_eq!(world.hosts[host].ended, None);
}

/// The refusals of the target itself are believed.
#[test]
fn a_refusal_with_the_right_tag_ends_the_initiator() {
    let mut world = world(Security::Mac);
    let host = world.start_host(1, false);
    ok(&mut world, host, WRITE, 0, 1);
    let second = world.start_host(2, false);
    assert_eq!(ended(&mut world, second), Ended::InUse);
    let third = world.start_host(2, true);
    ok(&mut world, third, Action::Read, 0, 1);
    assert_eq!(ended(&mut world, host), Ended::Fenced);
}

/// A client cannot use another one's name: neither as a client that replaces its sessions, nor as an instance that joins one.
#[test]
fn clients_with_different_keys_are_different_clients() {
    let mut world = world(Security::Mac);
    let host = world.start_host(1, false);
    ok(&mut world, host, WRITE, 0, 1);
    // It calls itself client 1, with the key of client 2.
    world.next_key = Some(Some(crate::world::key(2)));
    let second = world.start_host(1, false);
    assert_eq!(ended(&mut world, second), Ended::InUse);
    ok(&mut world, host, Action::Read, 0, 1);
    assert_eq!(sessions(&world), 1);
}

#[test]
fn keys_change_before_they_have_protected_too_many_frames() {
    for security in [Security::Mac, Security::Encrypt] {
        let settings = Settings {
            security,
            frames_per_key: 1024,
            ..Settings::default()
        };
        let mut world = World::new(3, settings);
        let host = world.start_host(1, false);
        world.catch = Some(|header, _| {
            // One frame in a hundred arrives late, some of them after a change of keys.
            header.kind == frame_kind::DATA && header.number.get() % 100 == 24
        });
        for round in 0..2500 {
            ok(&mut world, host, WRITE, round % 60, 3);
            if round % 7 == 0 {
                for arrival in std::mem::take(&mut world.caught) {
                    world.arrive(&arrival);
                }
            }
        }
        ok(&mut world, host, Action::Read, 0, 60);
        let numbers = world.frames_to_target.iter().map(|h| h.number.get());
        assert!(numbers.max() > Some(4 * 1024));
        assert!(world.hosts[host].ended.is_none());
    }
}

/// A forged frame of a later key must not end the use of the present one.
#[test]
fn a_frame_that_claims_a_later_key_changes_nothing() {
    let (mut world, host) = used(Security::Mac);
    let request = sent_of(&world, frame_kind::REQUESTS).remove(0);
    for ahead in [1_u64 << 22, 1 << 23, 1 << 40, u64::MAX >> 1, u64::MAX] {
        let mut later = header(&request);
        later.number = ahead.into();
        let mut frame = request.frame.clone();
        frame[..HEADER_BYTES].copy_from_slice(later.as_bytes());
        let (link, to) = (request.link, request.to);
        world.arrive(&Arrival { link, to, frame });
    }
    let sent = world.frames;
    ok(&mut world, host, Action::Read, 0, 3);
    assert!(world.frames - sent < 8, "nothing was sent twice");
}

#[test]
fn ten_thousand_handshakes_of_a_stranger_with_cookies_leave_no_state() {
    let (mut world, host) = used(Security::Mac);
    // He has a cookie of his address, and knows the names and fingerprints of the clients.
    world.next_key = Some(Some(Key::new([77; 32])));
    let stranger = world.start_host(3, true);
    assert_eq!(ended(&mut world, stranger), Ended::NotAllowed);
    let handshakes = sent_of(&world, frame_kind::HANDSHAKE);
    let record = |arrival: &Arrival| {
        let (record, _) = Handshake::read_from_prefix(&arrival.frame[HEADER_BYTES..]).unwrap();
        record
    };
    let (first, own) = (&handshakes[0], handshakes.last().unwrap());
    let (genuine, cookie) = (record(first), record(own).cookie);
    assert_ne!(header(first).source, header(own).source);
    let strangers = world.strangers;
    for index in 0..10_000_u32 {
        let mut asked = genuine;
        asked.cookie = cookie;
        asked.index = (index + 1).into();
        if index % 2 == 0 {
            asked.instance = [index as u8; 16];
        }
        world.arrive(&forged(own, frame_kind::HANDSHAKE, 0, asked.as_bytes()));
    }
    assert_eq!(sessions(&world), 1);
    // The administrator hears of them once a second.
    assert!(world.strangers - strangers <= 1);
    ok(&mut world, host, WRITE, 0, 3);
    assert_eq!(world.hosts[host].ended, None);
}
