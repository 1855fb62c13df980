//! A simulated device with seeded faults
