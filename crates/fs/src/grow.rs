//! Grows a mounted volume.

use jericho_metadata::errno::EROFS;
use jericho_volume::{GrowError, GrowRequest, GrownDevice};

use crate::error::Error;
use crate::fs::Fs;

impl Fs {
    /// Takes larger devices into use, as `Volume::grow` does. When it returns, files and metadata can have the new space, and writers
    /// that waited for space try again.
    pub fn grow(&self, request: &GrowRequest) -> Result<Vec<GrownDevice>, GrowError> {
        let core = &self.core;
        core.may_change().map_err(|error| match error {
            Error::Errno(errno) if EROFS.errno() == errno => GrowError::ReadOnly,
            error => GrowError::Failed(error.to_string()),
        })?;
        let grown = core.volume.grow(request);
        let _alone = self.extending.lock();
        // Also after an error: another call may have grown the volume, and not come here yet.
        let slices = core.volume.slices().iter().map(Into::into).collect();
        if core.allocator.grow(slices) > 0 {
            core.leaving.freed(0);
        }
        grown
    }
}
