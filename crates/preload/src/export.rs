//! How a hook gets its names.

/// Exports a function of this module under the names by which programs call it.
///
/// `exports! { read as read, __read: (fd: c_int, ...) -> ssize_t; }` defines the C functions `read` and
/// `__read`, which call `fn read(fd, ...)` of the module.
///
/// The ABI is "C-unwind" since glibc cancels a thread by unwinding its stack from within the blocking
/// call, through the hook. The frames own nothing, so nothing is skipped by that.
macro_rules! exports {
    ($($hook:ident as $($name:ident),+ : ($($argument:ident: $type:ty),*) $(-> $answer:ty)?;)*) => {
        $(exports!(@one $hook [$($name)+] ($($argument: $type),*) ($($answer)?));)*
    };
    (@one $hook:ident [$($name:ident)+] $arguments:tt $answer:tt) => {
        $(exports!(@name $hook $name $arguments $answer);)+
    };
    (@name $hook:ident $name:ident ($($argument:ident: $type:ty),*) ($($answer:ty)?)) => {
        const _: () = {
            /// The C library's function of this name.
            ///
            /// # Safety
            /// As the C library's.
            #[unsafe(no_mangle)]
            unsafe extern "C-unwind" fn $name($($argument: $type),*) $(-> $answer)? {
                // SAFETY: the caller keeps to what the C library asks for.
                unsafe { self::$hook($($argument),*) }
            }
        };
    };
}
