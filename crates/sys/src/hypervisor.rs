//! The hypervisor below this machine.

/// The vendor of QEMU's emulation of CPUs (TCG).
pub const EMULATOR: &str = "TCGTCGTCGTCG";
/// What [`vendor`] returns if the processor tells of no hypervisor.
pub const NONE: &str = "none";

/// Returns the vendor of the hypervisor, for example `KVMKVMKVM` or [`EMULATOR`]. Returns [`NONE`] if the processor tells of no hypervisor, and `None`
/// if it does not tell its name, or has no CPUID. A hypervisor may hide, or take the name of another one.
#[cfg(target_arch = "x86_64")]
pub fn vendor() -> Option<String> {
    /// Features of the processor. Bit 31 of ECX: there is a hypervisor.
    const FEATURES: u32 = 1;
    /// Vendor of the hypervisor, in EBX, ECX and EDX.
    const VENDOR: u32 = 0x4000_0000;
    if cpuid(FEATURES).ecx >> 31 == 0 {
        return Some(NONE.to_owned());
    }
    let found = cpuid(VENDOR);
    name([found.ebx, found.ecx, found.edx])
}

/// Asks the processor about itself.
#[cfg(target_arch = "x86_64")]
#[allow(unused_unsafe)] // newer versions of Rust than the oldest one that builds this have it as a safe function
fn cpuid(leaf: u32) -> std::arch::x86_64::CpuidResult {
    // SAFETY: every x86-64 processor has the instruction, which changes no memory.
    unsafe { std::arch::x86_64::__cpuid(leaf) }
}

/// Returns the vendor of the hypervisor: `None`, because this processor does not tell it.
#[cfg(not(target_arch = "x86_64"))]
pub fn vendor() -> Option<String> {
    None
}

/// Returns the name in three registers. Returns `None` if that is no name.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
fn name(registers: [u32; 3]) -> Option<String> {
    let bytes: Vec<u8> = registers.into_iter().flat_map(u32::to_le_bytes).collect();
    let text = std::str::from_utf8(&bytes).ok()?;
    let text = text.trim_end_matches('\0').trim();
    let is_name = !text.is_empty() && !text.contains(char::is_control);
    is_name.then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registers(name: &[u8; 12]) -> [u32; 3] {
        [0, 4, 8].map(|at| u32::from_le_bytes(name[at..at + 4].try_into().unwrap()))
    }

    #[test]
    fn a_vendor_is_the_text_in_the_registers() {
        let name_of = |text: &[u8; 12]| name(registers(text));
        assert_eq!(name_of(b"KVMKVMKVM\0\0\0").as_deref(), Some("KVMKVMKVM"));
        assert_eq!(name_of(b"TCGTCGTCGTCG").as_deref(), Some(EMULATOR));
        assert_eq!(name_of(&[0; 12]), None);
        assert_eq!(name_of(b"KVM\0KVM\x1b[2J\0"), None);
        assert_eq!(name_of(&[0xff; 12]), None);
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn the_kernel_sees_a_hypervisor_where_the_processor_tells_of_one() {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let mut flags = info.lines().filter(|line| line.starts_with("flags"));
        let has_flag = flags.any(|line| line.split(' ').any(|flag| flag == "hypervisor"));
        assert_eq!(vendor().as_deref() != Some(NONE), has_flag);
    }
}
