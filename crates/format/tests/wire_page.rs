//! Compares `docs/formats/wire.md` with the structs.

mod page;

use jericho_format::wire::{
    Accept, CHANNELS_MAX, CompletionRecord, FrameHeader, HEADER_BYTES, Handshake, Hello, LANES_MAX,
    Offer, PAYLOAD_BYTES_MAX, POOL_PAGES_MAX, Refused, RequestRecord, SLOTS_MAX, frame_kind,
    payload_max_of, reason,
};
use page::{documented, table};

const PAGE: &str = include_str!("../../../docs/formats/wire.md");

#[test]
fn the_page_has_every_field_at_its_offset() {
    assert_eq!(
        documented(PAGE, "FrameHeader"),
        fields!(FrameHeader: destination source ethertype kind flags index payload_bytes credit number
            ack_end acks slot place sequence pool_page crc)
    );
    assert_eq!(
        documented(PAGE, "RequestRecord"),
        fields!(RequestRecord: op flags slot sequence offset_bytes length_bytes pool_page reserved)
    );
    assert_eq!(
        documented(PAGE, "CompletionRecord"),
        fields!(CompletionRecord: slot error sequence verifier reserved)
    );
    assert_eq!(
        documented(PAGE, "Hello"),
        fields!(Hello: magic version_min version_max reserved0 index host export)
    );
    assert_eq!(
        documented(PAGE, "Offer"),
        fields!(Offer: magic version security flags reserved1 cookie target host export)
    );
    assert_eq!(
        documented(PAGE, "Handshake"),
        fields!(Handshake: magic version security flags index cookie client instance export credit
            payload_max replaces lane reserved1 key noise)
    );
    assert_eq!(
        documented(PAGE, "Accept"),
        fields!(Accept: magic version reserved0 flags index instance session size_bytes verifier salt
            pool_pages slots credit payload_max reserved1 near_page near_pages)
    );
    assert_eq!(
        documented(PAGE, "Refused"),
        fields!(Refused: magic reason reserved0 index)
    );
}

/// Returns the numbers in the second column of the table whose first line begins with `start`.
fn numbers(start: &str) -> Vec<(String, u16)> {
    let rows = PAGE.lines().skip_while(|line| !line.starts_with(start));
    let rows = rows.skip(2).take_while(|line| line.starts_with('|'));
    let cells = rows.map(|row| row.split('|').map(str::trim).collect::<Vec<_>>());
    cells
        .map(|cells| (cells[1].to_owned(), cells[2].parse().expect("a number")))
        .collect()
}

#[test]
fn the_page_has_the_numbers_of_the_code() {
    use frame_kind::*;
    let kinds = [
        ("HELLO", HELLO),
        ("OFFER", OFFER),
        ("HANDSHAKE", HANDSHAKE),
        ("ACCEPT", ACCEPT),
        ("REFUSED", REFUSED),
        ("REQUESTS", REQUESTS),
        ("COMPLETIONS", COMPLETIONS),
        ("DATA", DATA),
        ("ACK", ACK),
        ("PING", PING),
        ("CLOSE", CLOSE),
    ];
    let kinds = kinds.map(|(name, number)| (name.to_owned(), u16::from(number)));
    assert_eq!(numbers("| kind |"), kinds);
    let reasons = [
        ("unknown index", reason::UNKNOWN_INDEX),
        ("fenced", reason::FENCED),
        ("in use", reason::IN_USE),
        ("version", reason::VERSION),
        ("not allowed", reason::NOT_ALLOWED),
        ("protocol violation", reason::PROTOCOL),
        ("detached", reason::DETACHED),
        ("waiting", reason::WAITING),
    ];
    assert_eq!(
        numbers("| reason |"),
        reasons.map(|(name, number)| (name.to_owned(), number))
    );
    let limits = table(PAGE, "Limits");
    let limit = |row: usize| limits[row][1].replace(',', "");
    assert_eq!(limit(2), format!("1 to {SLOTS_MAX}"));
    assert_eq!(limit(3), LANES_MAX.to_string());
    assert!(limit(4).starts_with(&format!("{CHANNELS_MAX}. ")));
    assert_eq!(limit(5), format!("256 to {POOL_PAGES_MAX}"));
    let frame = format!(
        "A frame has a header of {HEADER_BYTES} bytes, then a payload of at most {PAYLOAD_BYTES_MAX} bytes"
    );
    assert!(PAGE.contains(&frame));
}

#[test]
fn the_page_has_the_payload_of_each_mtu() {
    let rows = PAGE.lines().skip_while(|line| !line.starts_with("| MTU |"));
    let mut smaller = None;
    for row in rows.skip(2).take_while(|line| line.starts_with('|')) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let (mtu, payload) = match cells[1].strip_prefix("from ") {
            Some(mtu) => (mtu.parse().expect("an MTU"), cells[2].parse().ok()),
            None => (0, None),
        };
        assert_eq!(payload_max_of(mtu), payload);
        if let Some(smaller) = smaller {
            assert_eq!(payload_max_of(smaller), payload);
        }
        smaller = mtu.checked_sub(1);
    }
}
