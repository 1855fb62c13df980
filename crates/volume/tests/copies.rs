//! Copies of the superblock that differ, because devices missed changes or the power was cut: each part comes from a device that has all of
//! its changes.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use jericho_format::PAGE_BYTES;
use jericho_format::superblock::{
    CHUNK_SPARE, CHUNKS_MAX, COPY_FIRST_BLOCK, ChunkEntry, SliceEntry, Superblock,
};
use jericho_sim::{DeviceSet, FaultPlan, Operation, SimDevice};
use jericho_storage::{Device, IoError, Layer};
use jericho_volume::{
    AddError, FormatOptions, GrowRequest, OpenMode, Volume, VolumeError, add_device, format_devices,
};
use zerocopy::FromZeros;
use zerocopy::byteorder::little_endian::{U16, U32, U64};

const MIB: u64 = 1 << 20;
const EIO: i32 = 5;

/// Makes a volume with a slice, which has a store, on each device.
fn formatted(devices: usize) -> DeviceSet {
    let names = ["one", "two", "three"];
    let device = |name: &&str| SimDevice::new(name, 96 * MIB);
    let set = DeviceSet::new(names[..devices].iter().map(device));
    let options = FormatOptions {
        slices: Some(devices as u16),
        has_stores: Some(true),
        ..FormatOptions::default()
    };
    let paths: Vec<PathBuf> = names[..devices].iter().map(PathBuf::from).collect();
    format_devices(&set.as_devices(), &paths, &options, |_| Ok(())).unwrap();
    set
}

/// Makes a volume with a slice, which has a store, on each of the first devices of three.
fn formatted_beside_spares(devices: usize) -> DeviceSet {
    let set = formatted(3);
    let options = FormatOptions {
        slices: Some(devices as u16),
        has_stores: Some(true),
        force: true,
        ..FormatOptions::default()
    };
    format_devices(&set.as_devices()[..devices], &[], &options, |_| Ok(())).unwrap();
    set
}

fn open(devices: Vec<Arc<dyn Device>>) -> Volume {
    Volume::open_from_devices(devices, OpenMode::WRITE).unwrap()
}

/// Opens the volume without some of its devices.
fn open_without(set: &DeviceSet, missing: &[usize]) -> Volume {
    open(set.with_missing(missing))
}

/// Takes the chunk number `nth` from the space of a slice for its store, as the store does.
fn take_chunk(volume: &Volume, slice: usize, nth: u64) -> Result<(), IoError> {
    let device = volume.slices()[slice].device();
    volume.superblocks().update(&[device], |s| {
        let chunk = chunk_of(s, slice, nth);
        s.chunks.push(chunk);
        s.slices[slice].store_blocks += 64;
    })
}

fn chunk_of(superblock: &Superblock, slice: usize, nth: u64) -> ChunkEntry {
    let first = usize::from(superblock.slices[slice].first_region.get());
    let region = &superblock.regions[first];
    let slice_first = nth * u64::from(superblock.head.chunk_blocks.get());
    ChunkEntry {
        first_block: U64::new(region.first_block.get() + slice_first),
        position: U32::new(CHUNK_SPARE),
        device: region.device,
        slice: U16::new(slice as u16),
        slice_first: U64::new(slice_first),
    }
}

/// Returns how many chunks the store of a slice has taken, and the length of the store.
fn taken(volume: &Volume, slice: usize) -> (usize, u32) {
    volume.superblocks().with(|s| {
        let own = |c: &&ChunkEntry| {
            usize::from(c.slice.get()) == slice && c.slice_first.get() != u64::MAX
        };
        let length = s.slices[slice].store_blocks.get();
        (s.chunks.iter().filter(own).count(), length)
    })
}

/// Has each write to a device fail until `heal`.
fn fail(set: &DeviceSet, device: usize) {
    let mut plan = FaultPlan::fail_nth(Some(Operation::Write), 1, EIO);
    plan.faults[0].is_lasting = true;
    set.devices()[device].set_plan(plan);
}

fn heal(set: &DeviceSet, device: usize) {
    set.devices()[device].set_plan(FaultPlan::default());
}

#[test]
fn what_only_the_device_of_a_store_has_counts_however_far_the_others_get_without_it() {
    for devices in [2, 3] {
        // The others fall behind, get as far, and overtake.
        for others in 0..8 {
            let set = formatted(devices);
            let volume = open(set.as_devices());
            (0..devices)
                .filter(|other| *other != 1)
                .for_each(|other| fail(&set, other));
            for nth in 0..3 {
                take_chunk(&volume, 1, nth).unwrap();
            }
            drop(volume);
            (0..devices).for_each(|device| heal(&set, device));
            let volume = open_without(&set, &[1]);
            for nth in 0..others {
                take_chunk(&volume, 0, nth).unwrap();
            }
            drop(volume);
            for round in 0..3 {
                let volume = open(set.as_devices());
                let found = (taken(&volume, 0), taken(&volume, 1));
                let expected = ((others as usize, 64 * others as u32), (3, 192));
                assert_eq!(
                    found, expected,
                    "{devices} devices, {others} changes, {round}"
                );
                // The second round finds what the first one has written, and the third what a mount without the device has.
                match round {
                    0 => volume.mark_dirty().unwrap(),
                    _ => open_without(&set, &[1]).mark_clean().unwrap(),
                }
            }
        }
    }
}

#[test]
fn what_only_the_first_device_has_counts_when_the_others_are_back() {
    let set = formatted(3);
    let volume = open(set.as_devices());
    fail(&set, 1);
    fail(&set, 2);
    take_chunk(&volume, 0, 0).unwrap();
    heal(&set, 1);
    // The second device gets a greater sequence.
    fail(&set, 0);
    take_chunk(&volume, 1, 0).unwrap();
    take_chunk(&volume, 1, 1).unwrap();
    drop(volume);
    heal(&set, 0);
    heal(&set, 2);
    for missing in [vec![], vec![2], vec![1], vec![1, 2]] {
        let volume = open_without(&set, &missing);
        assert_eq!(taken(&volume, 0).0, 1, "without {missing:?}");
        if !missing.contains(&1) {
            assert_eq!(taken(&volume, 1).0, 2, "without {missing:?}");
        }
    }
}

#[test]
fn a_change_that_its_own_device_did_not_take_has_failed_and_does_not_come_back() {
    let set = formatted(2);
    let volume = open(set.as_devices());
    fail(&set, 1);
    take_chunk(&volume, 1, 0).unwrap_err();
    heal(&set, 1);
    drop(volume);
    // The first device has a copy with the chunk, whose blocks may belong to a file by now.
    let volume = open(set.as_devices());
    assert_eq!(taken(&volume, 1), (0, 0));
    take_chunk(&volume, 1, 5).unwrap();
    drop(volume);
    assert_eq!(taken(&open(set.as_devices()), 1), (1, 64));
    // Nor is a change possible for a device that is missing.
    let volume = open_without(&set, &[1]);
    let refused = take_chunk(&volume, 1, 6).unwrap_err();
    assert!(refused.to_string().contains("two"), "{refused}");
}

#[test]
fn no_number_of_a_superblock_is_used_for_two_of_them_on_a_device() {
    let set = formatted(2);
    let newest = |device: usize| {
        let copies = jericho_volume::superblocks::read_copies(&*set.devices()[device]).unwrap();
        let number = |copy: &Result<Superblock, _>| copy.as_ref().unwrap().head.sequence.get();
        let [first, second] = [number(&copies[0]), number(&copies[1])];
        (first.max(second), first == second)
    };
    let volume = open(set.as_devices());
    fail(&set, 0);
    (0..5).for_each(|nth| take_chunk(&volume, 1, nth).unwrap());
    drop(volume);
    heal(&set, 0);
    let ahead = newest(1).0;
    open_without(&set, &[1]).mark_dirty().unwrap();
    assert!(newest(0).0 < ahead);
    let volume = open(set.as_devices());
    let mut last = ahead;
    for nth in 0..4 {
        take_chunk(&volume, 0, nth).unwrap();
        for device in 0..2 {
            let (number, is_twice) = newest(device);
            assert!(number > last && !is_twice, "{number} after {last}");
        }
        last = newest(0).0;
    }
}

#[test]
fn a_growth_that_the_other_device_missed_counts_after_a_mount_without_the_grown_one() {
    let set = formatted(2);
    let volume = open(set.as_devices());
    set.devices()[1].enlarge(200 * MIB);
    fail(&set, 0);
    let grown = volume.grow(&GrowRequest::default()).unwrap();
    assert_eq!(grown.len(), 1);
    let after: Vec<u64> = volume.slices().iter().map(|slice| slice.blocks).collect();
    drop(volume);
    heal(&set, 0);
    let volume = open_without(&set, &[1]);
    (0..9).for_each(|nth| take_chunk(&volume, 0, nth).unwrap());
    drop(volume);
    let volume = open(set.as_devices());
    let found: Vec<u64> = volume.slices().iter().map(|slice| slice.blocks).collect();
    assert_eq!(found, after);
    assert_eq!(taken(&volume, 0).0, 9);
    assert_eq!(volume.grow(&GrowRequest::default()).unwrap(), []);
}

#[test]
fn a_growth_that_the_grown_device_does_not_record_is_refused_and_possible_later() {
    let set = formatted(2);
    let volume = open(set.as_devices());
    let before: Vec<u64> = volume.slices().iter().map(|slice| slice.blocks).collect();
    set.devices()[1].enlarge(200 * MIB);
    fail(&set, 1);
    volume.grow(&GrowRequest::default()).unwrap_err();
    heal(&set, 1);
    drop(volume);
    let volume = open(set.as_devices());
    let found: Vec<u64> = volume.slices().iter().map(|slice| slice.blocks).collect();
    assert_eq!(found, before);
    assert_eq!(volume.grow(&GrowRequest::default()).unwrap().len(), 1);
}

type Hook = Box<dyn FnOnce() + Send>;

/// A device that does something before it grows.
struct Growing {
    inner: Arc<SimDevice>,
    before: Mutex<Option<Hook>>,
}

impl Layer for Growing {
    fn below(&self) -> &dyn Device {
        &*self.inner
    }
    fn grow(&self, size_bytes: u64, allocate_from: Option<u64>) -> Result<(), IoError> {
        if let Some(before) = self.before.lock().unwrap().take() {
            before();
        }
        self.inner.grow(size_bytes, allocate_from)
    }
}

#[test]
fn a_store_that_gets_longer_while_its_device_grows_keeps_its_length() {
    let set = formatted(1);
    let device = Arc::new(Growing {
        inner: set.devices()[0].clone(),
        before: Mutex::default(),
    });
    let volume = Arc::new(open(vec![device.clone()]));
    let other = volume.clone();
    set.devices()[0].enlarge(200 * MIB);
    // The growth has read the superblock then, and has not written it.
    let before: Hook = Box::new(move || take_chunk(&other, 0, 0).unwrap());
    *device.before.lock().unwrap() = Some(before);
    volume.grow(&GrowRequest::default()).unwrap();
    assert_eq!(taken(&volume, 0), (1, 64));
    drop(volume);
    assert_eq!(taken(&open(set.as_devices()), 0), (1, 64));
}

#[test]
fn a_volume_has_an_added_device_if_the_first_device_says_so_and_whatever_others_say() {
    let set = formatted_beside_spares(2);
    let devices = set.as_devices();
    let add = || {
        let volume = open(devices[..2].to_vec());
        let path = PathBuf::from("three");
        add_device(&volume, devices[2].clone(), &path, 1, |_, _| Ok(()))
    };
    // Only the second device gets the new superblock.
    fail(&set, 0);
    add().unwrap_err();
    heal(&set, 0);
    let volume = open(devices[..2].to_vec());
    assert_eq!(volume.slices().len(), 2);
    drop(volume);
    // Only the first one does, and the second one overtakes it.
    fail(&set, 1);
    add().unwrap();
    heal(&set, 1);
    assert!(matches!(
        Volume::open_from_devices(devices[..2].to_vec(), OpenMode::WRITE),
        Err(VolumeError::DeviceMissing { index: 2, .. })
    ));
    let volume = open(devices.clone());
    take_chunk(&volume, 2, 0).unwrap();
    fail(&set, 0);
    fail(&set, 2);
    (0..5).for_each(|nth| take_chunk(&volume, 1, nth).unwrap());
    drop(volume);
    heal(&set, 0);
    heal(&set, 2);
    let volume = open_without(&set, &[1]);
    assert_eq!((volume.slices().len(), taken(&volume, 2).0), (3, 1));
    drop(volume);
    let volume = open(devices);
    assert_eq!((taken(&volume, 1).0, taken(&volume, 2).0), (5, 1));
}

#[test]
fn a_mount_for_writing_needs_the_first_device_to_record_it() {
    let set = formatted(2);
    let volume = open(set.as_devices());
    fail(&set, 0);
    let refused = volume.mark_dirty().unwrap_err();
    assert!(refused.to_string().contains("one"), "{refused}");
}

#[test]
fn more_chunks_than_a_superblock_can_name_are_refused_and_cost_only_their_device() {
    let set = formatted(2);
    let volume = open(set.as_devices());
    fail(&set, 0);
    take_chunk(&volume, 1, 0).unwrap();
    drop(volume);
    heal(&set, 0);
    let volume = open_without(&set, &[1]);
    let free = volume.superblocks().with(|s| CHUNKS_MAX - s.chunks.len());
    // The device has no room for that many chunks of their real size.
    volume
        .superblocks()
        .update(&[0], |s| {
            s.head.chunk_blocks = U32::new(1);
            let mut chunks: Vec<_> = (0..free as u64).map(|nth| chunk_of(s, 0, nth)).collect();
            s.chunks.append(&mut chunks);
        })
        .unwrap();
    drop(volume);
    let refused = Volume::open_from_devices(set.as_devices(), OpenMode::WRITE)
        .err()
        .unwrap();
    assert!(
        matches!(refused, VolumeError::Contradiction(_)),
        "{refused}"
    );
    assert!(refused.to_string().contains("4097 chunks"), "{refused}");
    open_without(&set, &[1]);
}

#[test]
fn a_power_cut_in_the_middle_of_changes_keeps_all_that_were_made_durable() {
    let formatted = formatted(3);
    let mut cuts = 0;
    for nth in 1.. {
        let set = formatted.crash(0);
        let begun = set.supply().changes();
        set.supply().cut_at(nth);
        let volume = open(set.as_devices());
        // Chunks that each store has for certain.
        let mut durable = [0; 3];
        for change in 0..6 {
            let slice = change % 3;
            if take_chunk(&volume, slice, durable[slice] as u64).is_err() {
                break;
            }
            durable[slice] += 1;
        }
        let is_cut = set.supply().changes() - begun >= nth;
        drop(volume);
        for seed in 0..4 {
            for away in [None, Some(1), Some(2)] {
                let after = set.crash(seed);
                let away: Vec<usize> = away.into_iter().collect();
                if !away.is_empty() {
                    let volume = open_without(&after, &away);
                    (10..20).for_each(|nth| take_chunk(&volume, 0, nth).unwrap());
                }
                let volume = open(after.as_devices());
                for (slice, durable) in durable.into_iter().enumerate() {
                    let (found, length) = taken(&volume, slice);
                    let more = if slice == 0 { 10 * away.len() } else { 0 };
                    let what =
                        format!("cut at {nth}, seed {seed}, without {away:?}: slice {slice}");
                    assert_eq!(length as usize, 64 * found, "{what}");
                    let expected = durable + more..=durable + more + 1;
                    assert!(expected.contains(&found), "{what}: {found}, {durable}");
                }
            }
        }
        cuts += 1;
        if !is_cut {
            break;
        }
    }
    assert!(cuts > 30, "only {cuts} operations");
}

#[test]
fn a_device_is_added_while_the_volume_is_in_use() {
    for slices in [1, 2] {
        // A volume of one slice has one store, and each slice has its own afterwards.
        let set = formatted_beside_spares(slices);
        let devices = set.as_devices();
        let volume = open(devices[..slices].to_vec());
        take_chunk(&volume, 0, 0).unwrap();
        for (number, device) in (slices..3).zip(&devices[slices..]) {
            let path = PathBuf::from("new");
            let used = |staged: &Volume, stores: std::ops::Range<usize>| {
                assert_eq!(stores, number..number + 1);
                // Stores of the volume, and the new one, get space meanwhile.
                (0..slices).for_each(|slice| take_chunk(&volume, slice, number as u64).unwrap());
                Ok(take_chunk(staged, number, 0)?)
            };
            let added = add_device(&volume, device.clone(), &path, 1, used).unwrap();
            assert_eq!(added.first_slice, number);
            assert_eq!(
                volume.slices().len(),
                slices,
                "its slices are of the next mount"
            );
            take_chunk(&volume, 0, 10 + number as u64).unwrap();
        }
        // The device of the volume grows, not the new one.
        set.devices()
            .iter()
            .for_each(|device| device.enlarge(200 * MIB));
        let grown = volume.grow(&GrowRequest::default()).unwrap();
        assert_eq!(grown.len(), slices);
        assert_eq!(volume.slices().len(), slices);
        let size = volume.slices()[0].blocks;
        drop(volume);
        let volume = open(devices);
        let (added, old) = (3 - slices, slices);
        assert_eq!(
            (volume.slices().len(), volume.slices()[0].blocks),
            (3, size)
        );
        assert_eq!(taken(&volume, 0).0, 1 + 2 * added);
        assert!((1..old).all(|slice| taken(&volume, slice).0 == added));
        assert!((old..3).all(|slice| taken(&volume, slice) == (1, 64)));
        assert_eq!(volume.grow(&GrowRequest::default()).unwrap().len(), added);
    }
}

/// Writes a superblock to both copies on a device.
fn overwrite(device: &dyn Device, superblock: &Superblock) {
    for first_block in COPY_FIRST_BLOCK {
        let at = first_block * PAGE_BYTES;
        device.write_at(at, &superblock.encode()).unwrap();
    }
    device.flush().unwrap();
}

/// Makes a volume with one slice, which has space on two devices.
fn formatted_over_two() -> DeviceSet {
    let set = formatted(2);
    let options = FormatOptions {
        slices: Some(1),
        force: true,
        ..FormatOptions::default()
    };
    format_devices(&set.as_devices(), &[], &options, |_| Ok(())).unwrap();
    set
}

#[test]
fn a_copy_without_a_slice_that_has_no_space_does_not_count_for_the_slice() {
    let set = formatted_over_two();
    let superblock = open(set.as_devices()).superblocks().with(Superblock::clone);
    let mut newer = superblock.clone();
    newer.head.sequence = U64::new(9);
    overwrite(&*set.devices()[1], &newer);
    let mut more = superblock;
    more.slices.push(SliceEntry::new_zeroed());
    overwrite(&*set.devices()[0], &more);
    assert_eq!(open(set.as_devices()).slices().len(), 2);
}

#[test]
fn the_owner_of_a_mount_without_a_device_that_is_ahead_is_seen_with_that_device() {
    let set = formatted(2);
    let volume = open(set.as_devices());
    fail(&set, 0);
    (0..9).for_each(|nth| take_chunk(&volume, 1, nth).unwrap());
    drop(volume);
    heal(&set, 0);
    let owner = |volume: &Volume| volume.superblocks().with(|s| s.head.owner);
    let mounted = open_without(&set, &[1]);
    mounted.mark_dirty().unwrap();
    // Another machine sees all devices.
    let other = open(set.as_devices());
    assert!(other.is_dirty());
    assert_eq!(owner(&other), owner(&mounted));
    drop(other);
    mounted.mark_clean().unwrap();
    assert!(!open(set.as_devices()).is_dirty());
}

#[test]
fn a_mount_ends_when_the_first_device_records_it() {
    let set = formatted(2);
    let volume = open(set.as_devices());
    volume.mark_dirty().unwrap();
    fail(&set, 0);
    let refused = volume.mark_clean().unwrap_err();
    assert!(refused.to_string().contains("one"), "{refused}");
    heal(&set, 0);
    assert!(open(set.as_devices()).is_dirty());
    fail(&set, 1);
    volume.mark_clean().unwrap();
    heal(&set, 1);
    assert!(!open(set.as_devices()).is_dirty());
}

#[test]
fn a_growth_that_only_a_device_without_a_slice_recorded_is_possible_later() {
    let set = formatted_over_two();
    let volume = open(set.as_devices());
    let before = volume.slices()[0].blocks;
    set.devices()[1].enlarge(200 * MIB);
    fail(&set, 0);
    volume.grow(&GrowRequest::default()).unwrap_err();
    drop(volume);
    heal(&set, 0);
    let volume = open(set.as_devices());
    assert_eq!(volume.slices()[0].blocks, before);
    assert_eq!(volume.grow(&GrowRequest::default()).unwrap().len(), 1);
    drop(volume);
    let volume = open(set.as_devices());
    assert!(volume.slices()[0].blocks > before);
    assert_eq!(volume.grow(&GrowRequest::default()).unwrap(), []);
}

#[test]
fn a_second_attempt_after_an_addition_failed_in_its_last_step_leaves_a_volume() {
    let set = formatted_beside_spares(2);
    let devices = set.as_devices();
    let volume = open(devices[..2].to_vec());
    let add = || {
        let path = PathBuf::from("three");
        add_device(&volume, devices[2].clone(), &path, 1, |_, _| Ok(()))
    };
    // The first device may have the superblock then. It cannot be flushed any more.
    let plan = FaultPlan::fail_nth(Some(Operation::Flush), 1, EIO);
    set.devices()[0].set_plan(plan);
    let refused = add().unwrap_err();
    assert!(matches!(refused, AddError::Last(_)), "{refused}");
    // The device that the superblock may name stays as it is.
    add().unwrap_err();
    drop(volume);
    let mut slices = Vec::new();
    for seed in 0..8 {
        let after = set.crash(seed);
        let devices = after.as_devices();
        let found = match Volume::open_from_devices(devices[..2].to_vec(), OpenMode::WRITE) {
            Err(VolumeError::DeviceMissing { index: 2, .. }) => open(devices),
            found => found.unwrap(),
        };
        slices.push(found.slices().len());
    }
    assert!(slices.contains(&2) && slices.contains(&3), "{slices:?}");
}
