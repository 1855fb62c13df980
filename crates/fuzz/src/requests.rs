//! Parses messages without serving them: those of the handshake and those of the kernel.

use jericho_shm::{Reply, Request};

/// Parses both messages of the handshake over the daemon's socket.
pub fn handshake(data: &[u8]) {
    if let Some(request) = Request::decode(data) {
        assert_eq!(Request::decode(&request.encode()), Some(request));
    }
    if let Some(reply) = Reply::decode(data) {
        assert_eq!(Reply::decode(&reply.encode()), Some(reply));
    }
}

/// Parses a message of the kernel, as from the device and as from the FUSE ring.
pub fn kernel(data: &[u8]) {
    jericho_fuse::parse_any(data);
    // Parses it again with the right length and an existing operation.
    let mut message = data.to_vec();
    if message.len() >= 8 {
        let len = message.len() as u32;
        message[..4].copy_from_slice(&len.to_ne_bytes());
        message[5..8].fill(0);
        message[4] %= 54;
        jericho_fuse::parse_any(&message);
    }
}
