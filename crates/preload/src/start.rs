//! The library's constructor and destructor.

use crate::{errno, real, report};

// The C library calls the functions in these sections once: before main, and after the program's own exit handlers.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;

/// Prepares the library. Constructors of other libraries may run earlier: hooks work without this.
extern "C" fn start() {
    real::find_all();
    errno::kept(jericho_client::fd::prepare);
    report::prepare();
}

/// Writes the report. Other destructors may run later: their calls work, but are not in the report.
extern "C" fn end() {
    report::write();
}
