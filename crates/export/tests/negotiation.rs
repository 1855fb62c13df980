//! The negotiation in good order: what old clients and current ones ask for.

mod support;

use std::sync::Arc;

use jericho_export::ExportOptions;
use jericho_sim::SimDevice;
use jericho_storage::Device;
use support::{DISC, READ, Served};

const SIZE: u64 = 1 << 20;
const ACK: u32 = 1;

fn served() -> Served {
    let options = ExportOptions {
        name: "disk".into(),
        read_only: false,
    };
    let device: Arc<dyn Device> = Arc::new(SimDevice::new("sim", SIZE));
    Served::with(device, options)
}

#[test]
fn an_old_client_starts_by_the_export_name() {
    let served = served();
    for (client_flags, zeros) in [(0u32, 124), (1, 124), (3, 0)] {
        for name in ["", "disk"] {
            let mut client = served.connect();
            client.take(18);
            client.send(&client_flags.to_be_bytes());
            client.option(1, name.as_bytes());
            assert_eq!(client.take(8), SIZE.to_be_bytes());
            // HAS_FLAGS, SEND_FLUSH, SEND_FUA, SEND_WRITE_ZEROES, CAN_MULTI_CONN, SEND_FAST_ZERO.
            assert_eq!(client.take(2), 0x94du16.to_be_bytes());
            assert_eq!(client.take(zeros), vec![0; zeros]);
            assert_eq!(client.read(SIZE - 1, 1), [0]);
            client.request(DISC, 0, 0, 0, 0);
            assert!(client.rest().is_empty());
        }
    }
}

#[test]
fn the_list_and_the_information_name_the_export() {
    let served = served();
    let mut client = served.connect();
    client.greet();
    client.option(3, b"");
    let entry = (3, 2, b"\0\0\0\x04disk".to_vec());
    assert_eq!(client.option_reply(), entry);
    assert_eq!(client.option_reply(), (3, ACK, vec![]));
    // Name, description, and a kind that does not exist.
    client.option(6, b"\0\0\0\x04disk\0\x03\0\x01\0\x02\0\x63");
    let mut infos = vec![];
    loop {
        let (option, kind, data) = client.option_reply();
        assert_eq!(option, 6);
        if kind == ACK {
            break;
        }
        assert_eq!(kind, 3);
        infos.push((data[1], data[2..].to_vec()));
    }
    let sizes = [1u32, 4096, 32 << 20].map(u32::to_be_bytes).concat();
    assert_eq!(infos[0].0, 0);
    assert_eq!(infos[1], (3, sizes));
    assert_eq!(infos[2], (1, b"disk".to_vec()));
    assert_eq!(infos[3], (2, b"jericho: sim".to_vec()));
    assert_eq!(infos.len(), 4);
}

#[test]
fn contexts_are_listed_and_count_only_for_the_name_that_selected_them() {
    let served = served();
    for (name, counts) in [("", false), ("disk", true)] {
        let mut client = served.connect();
        client.greet();
        client.option(8, b"");
        client.option_reply();
        for queries in [&b"\0\0\0\0"[..], b"\0\0\0\x01\0\0\0\x05base:"] {
            client.option(9, &[b"\0\0\0\0", queries].concat());
            let listed = (9, 4, b"\0\0\0\0base:allocation".to_vec());
            assert_eq!(client.option_reply(), listed);
            assert_eq!(client.option_reply().1, ACK);
        }
        client.option(10, b"\0\0\0\x04disk\0\0\0\x01\0\0\0\x0fbase:allocation");
        let selected = (10, 4, b"\0\0\0\x01base:allocation".to_vec());
        assert_eq!(client.option_reply(), selected);
        assert_eq!(client.option_reply().1, ACK);
        let length = (name.len() as u32).to_be_bytes();
        client.option(7, &[&length[..], name.as_bytes(), &[0, 0]].concat());
        while client.option_reply().1 != ACK {}
        client.request(support::BLOCK_STATUS, 0, 5, 0, 4096);
        let (kind, _) = client.chunk(5);
        assert_eq!(kind == 5, counts, "{name:?}");
        client.request(READ, 0, 6, 0, 1);
        assert_eq!(client.chunk(6).0, 1);
    }
}
