//! Hooks of functions with a variable number of arguments, which Rust cannot define.
//!
//! All work happens before the C library's function: a trampoline saves the registers that may hold arguments and calls `before`,
//! which returns the C library's function. It then restores the registers and jumps there with the original stack, as if it had
//! not run.

use crate::{exec, fork, stdio};

macro_rules! trampoline {
    ($($name:ident),+ => $before:path) => {
        $(const _: () = {
            /// The C library's function of this name.
            ///
            /// # Safety
            /// As for the C library's function.
            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            unsafe extern "C-unwind" fn $name() {
                pass_on!($before)
            }
        };)+
    };
}

// On entry the stack is 8 bytes off a multiple of 16; seven registers and 128 bytes make it a multiple. rax holds the number of
// vector registers in use. r11 is free between two functions.
#[cfg(target_arch = "x86_64")]
macro_rules! pass_on {
    ($before:path) => {
        std::arch::naked_asm!(
            "push rdi",
            "push rsi",
            "push rdx",
            "push rcx",
            "push r8",
            "push r9",
            "push rax",
            "sub rsp, 128",
            "movups [rsp], xmm0",
            "movups [rsp + 16], xmm1",
            "movups [rsp + 32], xmm2",
            "movups [rsp + 48], xmm3",
            "movups [rsp + 64], xmm4",
            "movups [rsp + 80], xmm5",
            "movups [rsp + 96], xmm6",
            "movups [rsp + 112], xmm7",
            "call {before}",
            "mov r11, rax",
            "movups xmm0, [rsp]",
            "movups xmm1, [rsp + 16]",
            "movups xmm2, [rsp + 32]",
            "movups xmm3, [rsp + 48]",
            "movups xmm4, [rsp + 64]",
            "movups xmm5, [rsp + 80]",
            "movups xmm6, [rsp + 96]",
            "movups xmm7, [rsp + 112]",
            "add rsp, 128",
            "pop rax",
            "pop r9",
            "pop r8",
            "pop rcx",
            "pop rdx",
            "pop rsi",
            "pop rdi",
            "jmp r11",
            before = sym $before,
        )
    };
}

// x0-x7 and v0-v7 hold arguments. x16 is free between two functions.
#[cfg(target_arch = "aarch64")]
macro_rules! pass_on {
    ($before:path) => {
        std::arch::naked_asm!(
            "stp x29, x30, [sp, #-208]!",
            "mov x29, sp",
            "stp x0, x1, [sp, #16]",
            "stp x2, x3, [sp, #32]",
            "stp x4, x5, [sp, #48]",
            "stp x6, x7, [sp, #64]",
            "stp q0, q1, [sp, #80]",
            "stp q2, q3, [sp, #112]",
            "stp q4, q5, [sp, #144]",
            "stp q6, q7, [sp, #176]",
            "bl {before}",
            "mov x16, x0",
            "ldp x0, x1, [sp, #16]",
            "ldp x2, x3, [sp, #32]",
            "ldp x4, x5, [sp, #48]",
            "ldp x6, x7, [sp, #64]",
            "ldp q0, q1, [sp, #80]",
            "ldp q2, q3, [sp, #112]",
            "ldp q4, q5, [sp, #144]",
            "ldp q6, q7, [sp, #176]",
            "ldp x29, x30, [sp], #208",
            "br x16",
            before = sym $before,
        )
    };
}

trampoline!(execl => exec::before_execl);
trampoline!(execle => exec::before_execle);
trampoline!(execlp => exec::before_execlp);
trampoline!(clone, __clone => fork::before_clone);
trampoline!(dprintf => stdio::before_dprintf);
trampoline!(__dprintf_chk => stdio::before_dprintf_checked);
