//! Frames outside of a channel: what a target tells to whom, and what an initiator makes of two answers.

use std::time::Duration;

use jericho_format::wire::{
    FRAMES_PER_KEY, FrameHeader, HEADER_BYTES, Handshake, Mac, Offer, frame_kind, mac_text,
    parse_mac,
};
use jericho_remote::{
    Discovery, Ended, Entropy, ExportConfig, Frame, Initiator, InitiatorConfig, InitiatorOutput,
    Link, Scheduler, Security, Target, TargetConfig, TargetOutput,
};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

const NOW: Duration = Duration::from_secs(1000);

fn entropy(seed: u64) -> Entropy {
    let mut random = jericho_sim::Random::new(seed);
    Box::new(move || random.next_u64())
}

fn link(last: u8) -> Link {
    Link {
        mac: [2, 0, 0, 0, 0, last],
        mtu: 9000,
        credit: 64,
        node: None,
        nic: 0,
    }
}

fn target(last: u8, is_hidden: bool) -> Target {
    let config = TargetConfig {
        host: "hostb".into(),
        ethertype: 0x88B5,
        slots: 4,
        pool_pages: 256,
        frames_per_key: FRAMES_PER_KEY,
    };
    let export = ExportConfig {
        name: "data".into(),
        size_bytes: 1 << 20,
        is_read_only: false,
        is_hidden,
        last_owner: None,
        security: Security::None,
        clients: Vec::new(),
    };
    let target = Target::new(config, &[link(last)], vec![export], entropy(last.into()));
    target.expect("a target")
}

fn initiator(export: &str) -> Initiator {
    initiator_of("", export)
}

fn initiator_of(host: &str, export: &str) -> Initiator {
    let config = InitiatorConfig {
        host: host.into(),
        export: export.into(),
        client: [1; 16],
        ethertype: 0x88B5,
        take_over: false,
        replay: true,
        pool_pages: 256,
        dead_after: None,
        scheduler: Scheduler::Affinity,
        batches: true,
        key: None,
        frames_per_key: FRAMES_PER_KEY,
    };
    Initiator::new(config, &[link(1)], entropy(9), NOW).expect("an initiator")
}

fn sent_by_initiator(initiator: &mut Initiator) -> Vec<Frame> {
    initiator.poll(NOW);
    let outputs = std::iter::from_fn(|| initiator.next_output());
    let frames = outputs.filter_map(|output| match output {
        InitiatorOutput::Send(frame) => Some(frame),
        _ => None,
    });
    frames.collect()
}

fn sent_by_target(target: &mut Target) -> Vec<Frame> {
    target.poll(NOW);
    let outputs = std::iter::from_fn(|| target.next_output());
    let frames = outputs.filter_map(|output| match output {
        TargetOutput::Send(frame) => Some(frame),
        _ => None,
    });
    frames.collect()
}

/// Returns what a target answers to frames.
fn answers(target: &mut Target, frames: &[Frame]) -> Vec<Frame> {
    for frame in frames {
        target.on_frame(NOW, 0, &mut frame.to_bytes(&[]));
    }
    sent_by_target(target)
}

/// Returns what a target answers to the HELLO of an initiator.
fn offers(target: &mut Target, initiator: &mut Initiator) -> Vec<Frame> {
    answers(target, &sent_by_initiator(initiator))
}

/// Returns the addresses that an initiator then asks for a channel.
fn asked(initiator: &mut Initiator) -> Vec<Mac> {
    initiator.poll(NOW + Duration::from_millis(100));
    let outputs = std::iter::from_fn(|| initiator.next_output());
    let asked = outputs.filter_map(|output| match output {
        InitiatorOutput::Send(frame) if frame.header.kind == frame_kind::HANDSHAKE => {
            Some(frame.header.destination)
        }
        _ => None,
    });
    asked.collect()
}

#[test]
fn a_hidden_export_is_offered_to_those_who_name_it() {
    let offered =
        |is_hidden, export| offers(&mut target(2, is_hidden), &mut initiator(export)).len();
    assert_eq!((offered(false, "data"), offered(true, "data")), (1, 1));
    // Without a name, all exports are asked for.
    assert_eq!((offered(false, ""), offered(true, "")), (1, 0));
    assert_eq!((offered(false, "other"), offered(true, "other")), (0, 0));
}

#[test]
fn a_target_keeps_no_state_for_a_handshake_without_its_cookie() {
    let mut target = target(2, false);
    let offer = offers(&mut target, &mut initiator("data"))
        .remove(0)
        .to_bytes(&[]);
    let (offer, _) = Offer::read_from_prefix(&offer[HEADER_BYTES..]).expect("an offer");
    let mut ask = |source: Mac, cookie: [u8; 16]| {
        let mut handshake = Handshake::new_zeroed();
        handshake.magic = offer.magic;
        handshake.version = offer.version;
        handshake.index = 7.into();
        (handshake.cookie, handshake.export) = (cookie, offer.export);
        handshake.payload_max = 1408.into();
        let mut payload = handshake.as_bytes().to_vec();
        payload.resize(1408, 0);
        let payload = &payload[..];
        let mut header = FrameHeader::new(frame_kind::HANDSHAKE, payload.len());
        (header.destination, header.source) = (link(2).mac, source);
        header.ethertype = 0x88B5.into();
        header.seal(0, payload);
        let mut frame = [header.as_bytes(), payload].concat();
        target.on_frame(NOW, 0, &mut frame);
        target.poll(NOW);
        std::iter::from_fn(|| target.next_output()).count()
    };
    for stranger in 0..10_000_u32 {
        let [.., a, b, c] = stranger.to_be_bytes();
        // The cookie is of another address.
        assert_eq!(ask([2, 1, 0, a, b, c], offer.cookie), 0);
        assert_eq!(ask(link(1).mac, [stranger as u8; 16]), 0);
    }
    assert_eq!(ask(link(1).mac, offer.cookie), 1, "it records the owner");
}

#[test]
fn two_targets_with_one_name_are_refused_with_both_addresses() {
    let end_of = |targets: [&[u8]; 2]| {
        let mut initiator = initiator("data");
        for targets in targets {
            let hellos = sent_by_initiator(&mut initiator);
            assert_eq!(hellos.len(), 1);
            for &last in targets {
                for offer in answers(&mut target(last, false), &hellos) {
                    initiator.on_frame(NOW, 0, &mut offer.to_bytes(&[]));
                }
            }
        }
        std::iter::from_fn(|| initiator.next_output()).find_map(|output| match output {
            InitiatorOutput::Ended(why) => Some(why),
            _ => None,
        })
    };
    let both = Ended::TwoTargets(link(2).mac, link(3).mac);
    assert_eq!(end_of([&[2, 3], &[2, 3]]), Some(both));
    // The first one was another process of the second one's host, or its address was damaged.
    assert_eq!(end_of([&[2, 3], &[3]]), None);
}

#[test]
fn a_host_may_be_named_by_an_address_of_it() {
    let asked_of = |host: &str| {
        let mut initiator = initiator_of(host, "data");
        let hellos = sent_by_initiator(&mut initiator);
        for last in [2, 3] {
            for offer in answers(&mut target(last, false), &hellos) {
                initiator.on_frame(NOW, 0, &mut offer.to_bytes(&[]));
            }
        }
        asked(&mut initiator)
    };
    for last in [2, 3] {
        let address = link(last).mac;
        assert_eq!(asked_of(&mac_text(&address)), [address]);
    }
    assert!(asked_of("02:00:00:00:00:04").is_empty());
}

#[test]
fn an_offer_that_answers_an_earlier_question_is_ignored() {
    for (is_late, expected) in [(true, vec![]), (false, vec![link(2).mac])] {
        let mut initiator = initiator("data");
        let mut offer = offers(&mut target(2, false), &mut initiator).remove(0);
        let index = offer.header.index.get();
        offer.header.index = (index ^ u32::from(is_late)).into();
        initiator.on_frame(NOW, 0, &mut offer.to_bytes(&[]));
        assert_eq!(asked(&mut initiator), expected);
    }
}

#[test]
fn a_discovery_finds_what_is_not_hidden_and_ignores_forged_answers() {
    let mut discovery = Discovery::new(&[link(1)], 0x88B5, entropy(5));
    let questions = discovery.questions();
    let answers = |last, is_hidden| answers(&mut target(last, is_hidden), &questions);
    for (last, is_hidden) in [(2, false), (3, true), (4, false)] {
        for offer in answers(last, is_hidden) {
            // Twice: questions are repeated.
            discovery.on_frame(0, &offer.to_bytes(&[]));
            discovery.on_frame(0, &offer.to_bytes(&[]));
        }
    }
    let names = |discovery: &Discovery| {
        let found = discovery.found();
        found
            .iter()
            .map(|one| (one.host.clone(), one.export.clone(), one.addresses.clone()))
            .collect::<Vec<_>>()
    };
    let expected = [2, 4].map(|last| ("hostb".into(), "data".into(), vec![(0, link(last).mac)]));
    let mut found = names(&discovery);
    found.sort();
    assert_eq!(found, expected);
    // Answers to other questions, damaged ones, and any bytes.
    let offer = answers(5, false).remove(0).to_bytes(&[]);
    let mut other = Discovery::new(&[link(1)], 0x88B5, entropy(6));
    other.on_frame(0, &offer);
    other.on_frame(1, &offer);
    for byte in 0..offer.len() {
        let mut damaged = offer.clone();
        damaged[byte] ^= 0x10;
        other.on_frame(0, &damaged);
        other.on_frame(0, &offer[..byte]);
    }
    assert!(other.found().is_empty());
}

#[test]
fn only_an_address_is_taken_for_one() {
    let mac = link(0xAB).mac;
    assert_eq!(parse_mac(&mac_text(&mac)), Some(mac));
    assert_eq!(parse_mac("02:00:00:00:00:aB"), Some(mac));
    for text in [
        "",
        "hostb",
        "02:00:00:00:00",
        "02:00:00:00:00:ab:00",
        "2:00:00:00:00:ab",
        "02:00:00:00:00:+a",
    ] {
        assert_eq!(parse_mac(text), None, "{text}");
    }
}
