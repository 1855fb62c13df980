//! What a device that wraps another one passes on unchanged.

/// Implements the methods of `Device` that describe the device in the field `device`, and `grow`.
macro_rules! facts_of_the_wrapped_device {
    () => {
        fn name(&self) -> std::sync::Arc<str> {
            self.device.name()
        }

        fn size_bytes(&self) -> u64 {
            self.device.size_bytes()
        }

        fn present_bytes(&self) -> Result<u64, $crate::IoError> {
            self.device.present_bytes()
        }

        fn grow(&self, size_bytes: u64, allocate_from: Option<u64>) -> Result<(), $crate::IoError> {
            self.device.grow(size_bytes, allocate_from)
        }

        fn home_node(&self) -> Option<u32> {
            self.device.home_node()
        }

        fn discard_effect(&self) -> $crate::DiscardEffect {
            self.device.discard_effect()
        }

        fn discard_makes_zeros(&self) -> bool {
            self.device.discard_makes_zeros()
        }

        fn is_absent(&self) -> bool {
            self.device.is_absent()
        }

        fn may_fall_silent(&self) -> bool {
            self.device.may_fall_silent()
        }

        fn is_silent(&self) -> bool {
            self.device.is_silent()
        }

        fn network(&self) -> Option<$crate::NetworkStat> {
            self.device.network()
        }

        fn is_read_only(&self) -> bool {
            self.device.is_read_only()
        }

        fn needs_stable_writes(&self) -> bool {
            self.device.needs_stable_writes()
        }
    };
}

pub(crate) use facts_of_the_wrapped_device;
