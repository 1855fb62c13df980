//! The data of a file that is on its devices and may not be durable.
//!
//! A sync of the file makes this data durable. Without this record, it would have to flush each device with data of any file that may not be
//! durable. While other files are written, each device has such data, so no sync could write its pages durably in one call.

use jericho_storage::FlushEpoch;
use parking_lot::Mutex;

use crate::flushes::DataFlushes;

/// By device: the epoch of the file's newest write that was not durable. `None` until the first sync: the file may have been in
/// memory before, so its writes are not known.
#[derive(Default)]
pub struct Unflushed(Mutex<Option<Vec<(u16, FlushEpoch)>>>);

impl Unflushed {
    /// Records a write of the file's data, which `DataFlushes` has recorded.
    pub fn note(&self, device: u16, epoch: FlushEpoch) {
        let mut newest = self.0.lock();
        let Some(newest) = &mut *newest else {
            return;
        };
        match newest.iter_mut().find(|(other, _)| *other == device) {
            // Another thread may have recorded a later write first.
            Some((_, known)) => *known = epoch.max(*known),
            None => newest.push((device, epoch)),
        }
    }

    /// Returns the devices that may have data of the file that is not durable. For a file that has just come into memory these are all devices
    /// with such data.
    pub fn devices(&self, flushes: &DataFlushes) -> Vec<u16> {
        let mut newest = self.0.lock();
        let newest = newest.get_or_insert_with(|| flushes.unflushed());
        newest.retain(|(device, epoch)| !flushes.is_flushed(*device, *epoch));
        newest.iter().map(|(device, _)| *device).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jericho_sim::SimDevice;
    use jericho_storage::Device;
    use std::sync::Arc;

    fn flushes() -> DataFlushes {
        let devices: [Arc<dyn Device>; 2] = ["one", "two"].map(|name| {
            let device: Arc<dyn Device> = Arc::new(SimDevice::new(name, 1 << 20));
            device
        });
        DataFlushes::new(&devices)
    }

    fn write(file: &Unflushed, flushes: &DataFlushes, device: u16) {
        file.note(device, flushes.note_write(device).unwrap());
    }

    #[test]
    fn a_file_needs_flushes_of_the_devices_on_which_it_was_written_only() {
        let flushes = flushes();
        let [file, other] = [Unflushed::default(), Unflushed::default()];
        assert!(file.devices(&flushes).is_empty() && other.devices(&flushes).is_empty());
        write(&other, &flushes, 0);
        write(&file, &flushes, 1);
        assert_eq!(file.devices(&flushes), [1]);
        flushes.flush([1]).unwrap();
        assert!(file.devices(&flushes).is_empty());
        assert_eq!(other.devices(&flushes), [0]);
    }

    #[test]
    fn writes_before_the_file_came_into_memory_count() {
        let flushes = flushes();
        flushes.note_write(1).unwrap();
        let file = Unflushed::default();
        write(&file, &flushes, 0);
        assert_eq!(file.devices(&flushes), [0, 1]);
        flushes.flush([0, 1]).unwrap();
        assert!(file.devices(&flushes).is_empty());
    }

    #[test]
    fn an_older_write_that_is_noted_last_does_not_hide_a_newer_one() {
        let flushes = flushes();
        let file = Unflushed::default();
        assert!(file.devices(&flushes).is_empty());
        let older = flushes.note_write(0).unwrap();
        flushes.flush([0]).unwrap();
        let newer = flushes.note_write(0).unwrap();
        file.note(0, newer);
        file.note(0, older);
        assert_eq!(file.devices(&flushes), [0]);
    }

    #[test]
    fn a_write_during_a_flush_needs_another_one() {
        let flushes = flushes();
        let file = Unflushed::default();
        assert!(file.devices(&flushes).is_empty());
        write(&file, &flushes, 0);
        flushes.flush([0]).unwrap();
        write(&file, &flushes, 0);
        assert_eq!(file.devices(&flushes), [0]);
    }
}
