//! Workloads and measurements
