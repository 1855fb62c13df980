//! A volume: its devices, its superblock, its slices' ranges and its metadata region.
