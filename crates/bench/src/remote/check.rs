//! Checks that a client returns what it wrote, and gives the blocks of a device content.

use crate::Result;
use crate::remote::client::{Client, Transfer};
use crate::remote::load::{Load, drive};

const PAGE: usize = 4096;

/// Fills bytes with a pattern that differs from page to page.
fn pattern(seed: u64, bytes: &mut [u8]) {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    for word in bytes.chunks_exact_mut(8) {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(seed | 1);
        word.copy_from_slice(&state.to_le_bytes());
    }
}

/// Begins a transfer in each of `slots` slots at distant offsets, and waits for all.
fn transfer_all(
    client: &mut dyn Client,
    is_write: bool,
    slots: usize,
    length: usize,
) -> Result<()> {
    let distance = client.size_bytes() / slots as u64 / length as u64 * length as u64;
    for slot in 0..slots {
        let transfer = Transfer {
            is_write,
            offset_bytes: slot as u64 * distance,
            length_bytes: length,
        };
        client.begin(slot, transfer)?;
    }
    let mut ended = Vec::new();
    while ended.len() < slots {
        client.wait(&mut ended)?;
    }
    Ok(())
}

/// Writes a pattern with transfers of all sizes that are measured, reads it back, and compares.
pub fn check(name: &str, client: &mut dyn Client, seed: u64) -> Result<()> {
    for (slots, length) in [(64, PAGE), (8, 128 << 10), (8, 1 << 20)] {
        let mut page = vec![0; PAGE];
        let pages = slots * length / PAGE;
        let seed_of = |at: usize| seed << 40 | (length as u64) << 16 | at as u64;
        for at in 0..pages {
            pattern(seed_of(at), &mut page);
            client.put(at * PAGE, &page);
        }
        transfer_all(client, true, slots, length)?;
        for at in 0..pages {
            client.put(at * PAGE, &[0; PAGE]);
        }
        transfer_all(client, false, slots, length)?;
        let mut read = vec![0; PAGE];
        for at in 0..pages {
            pattern(seed_of(at), &mut page);
            client.get(at * PAGE, &mut read);
            if page != read {
                let slot = at * PAGE / length;
                return Err(format!("{name}: a transfer of {length} bytes read other bytes than were written (slot {slot}, page {at})").into());
            }
        }
    }
    Ok(())
}

/// Writes the whole device once.
pub fn fill(client: &mut dyn Client) -> Result<()> {
    let load = Load::sequential(true, 1 << 20);
    let blocks = client.size_bytes() / load.block_bytes as u64;
    drive(client, &load, |done, _| Ok(done < blocks))
}
