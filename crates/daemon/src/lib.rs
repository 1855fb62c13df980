//! A mounted volume in a process: devices, slices, filesystem and the data path that joins them
