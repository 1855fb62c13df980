//! The filter of a packet socket that another process gets: a program that the kernel runs for each frame (classic BPF, socket(7)).

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd};

use libc::{sock_filter, sock_fprog};

// Instructions (linux/filter.h).
/// Loads the word at a place.
const LOAD: u16 = 0x20;
/// Continues with one of two following instructions: the first if the word is equal to a number, else the second.
const IF_EQUAL: u16 = 0x15;
/// Ends, with the number of bytes to receive of the frame; 0: the socket does not receive the frame.
const END: u16 = 0x06;
/// Places of what the kernel knows of a frame: its Ethertype, and the number of its interface.
const ETHERTYPE: u32 = (libc::SKF_AD_OFF + libc::SKF_AD_PROTOCOL) as u32;
const INTERFACE: u32 = (libc::SKF_AD_OFF + libc::SKF_AD_IFINDEX) as u32;

/// Makes a socket receive nothing but frames of one Ethertype on one interface, for ever: neither this process nor another one that gets
/// the socket can replace or remove the filter.
pub(crate) fn restrict(socket: BorrowedFd<'_>, ethertype: u16, interface: i32) -> io::Result<()> {
    let step = |code, k, jf| sock_filter { code, jt: 0, jf, k };
    let mut steps = [
        step(LOAD, ETHERTYPE, 0),
        step(IF_EQUAL, u32::from(ethertype), 3),
        step(LOAD, INTERFACE, 0),
        step(IF_EQUAL, interface as u32, 1),
        step(END, u32::MAX, 0),
        step(END, 0, 0),
    ];
    let program = sock_fprog {
        len: steps.len() as u16,
        filter: steps.as_mut_ptr(),
    };
    set_option(socket, libc::SO_ATTACH_FILTER, &program)?;
    set_option(socket, libc::SO_LOCK_FILTER, &1_i32)
}

fn set_option<T>(socket: BorrowedFd<'_>, option: i32, value: &T) -> io::Result<()> {
    let length = size_of::<T>() as libc::socklen_t;
    // SAFETY: the pointer and the length are those of `value`, which the kernel only reads. If `value` has instructions, their number is right, and they live
    // until the call ends.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            std::ptr::from_ref(value).cast(),
            length,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
