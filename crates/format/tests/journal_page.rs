//! Compares `docs/formats/journal.md` with the structs.

mod page;

use jericho_format::PAGE_BYTES;
use jericho_format::journal::{
    AREA_BLOCKS, BATCH_BYTES_MAX, BeginValue, HEADER_COPIES, JOURNAL_CLOSED, JOURNAL_VERSION,
    JournalHeader, PositionValue, SEGMENT_BLOCKS_MAX, SEGMENT_CONTINUES, SegmentHeader,
    segment_kind,
};
use page::{documented, table};

const PAGE: &str = include_str!("../../../docs/formats/journal.md");

#[test]
fn the_page_has_every_field_at_its_offset() {
    assert_eq!(
        documented(PAGE, "JournalHeader"),
        fields!(JournalHeader: magic version crc volume_uuid slice reserved0 flags blocks incarnation
            first_seq first_block first_crc earlier reserved)
    );
    assert_eq!(
        documented(PAGE, "BeginValue"),
        fields!(BeginValue: incarnation first_seq)
    );
    assert_eq!(
        documented(PAGE, "SegmentHeader"),
        fields!(SegmentHeader: magic version flags slice kind reserved0 crc incarnation seq prev_crc
            blocks payload_bytes pages requires batch_index durable_seq tail_seq secret reserved)
    );
    assert_eq!(
        documented(PAGE, "PositionValue"),
        fields!(PositionValue: incarnation seq block crc)
    );
}

/// Returns the meaning of a field.
fn meaning(heading: &str, field: &str) -> String {
    let rows = table(PAGE, heading);
    let row = rows.iter().find(|row| row[2] == field);
    row.unwrap_or_else(|| panic!("{heading}: {field}"))[3].clone()
}

#[test]
fn the_page_has_the_numbers_of_the_code() {
    for heading in ["JournalHeader", "SegmentHeader"] {
        assert_eq!(meaning(heading, "version"), JOURNAL_VERSION.to_string());
    }
    let flag = |heading, number: u32| meaning(heading, "flags").starts_with(&format!("{number}: "));
    assert!(flag("JournalHeader", JOURNAL_CLOSED));
    assert!(flag("SegmentHeader", SEGMENT_CONTINUES.into()));
    let kinds = format!("{} normal, {} pad", segment_kind::NORMAL, segment_kind::PAD);
    assert_eq!(meaning("SegmentHeader", "kind"), kinds);
    let first = &table(PAGE, "What is where")[HEADER_COPIES as usize][0];
    assert_eq!(*first, format!("from {HEADER_COPIES}"));
    // The page groups digits.
    let text = PAGE.replace(',', "");
    for sentence in [
        format!(
            "An area has {} to {} blocks",
            AREA_BLOCKS.start(),
            AREA_BLOCKS.end()
        ),
        format!("A *segment* is 1 to {SEGMENT_BLOCKS_MAX} neighbouring blocks"),
        format!(
            "A batch has at most {} MiB of payload",
            BATCH_BYTES_MAX >> 20
        ),
        format!("A *block* is {PAGE_BYTES} bytes"),
    ] {
        assert!(text.contains(&sentence), "{sentence}");
    }
}
