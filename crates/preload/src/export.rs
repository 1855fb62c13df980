//! Exports a hook under its names.

/// Exports a function of this module under the names by which programs call it.
///
/// `exports! { read as read, __read: (fd: c_int, ...) -> ssize_t; }` defines the C functions `read` and
/// `__read`, which call `fn read(fd, ...)` of the module.
///
/// The ABI is "C-unwind": glibc cancels a thread by unwinding its stack from the blocking call through the hook. The frames own
/// nothing, so unwinding skips no destructor.
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
            /// As for the C library's function.
            #[unsafe(no_mangle)]
            unsafe extern "C-unwind" fn $name($($argument: $type),*) $(-> $answer)? {
                // SAFETY: the caller follows the C library's rules.
                unsafe { self::$hook($($argument),*) }
            }
        };
    };
}
