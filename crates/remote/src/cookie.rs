//! Cookies: rule 13 of `docs/formats/wire.md`.

use std::hash::Hasher;
use std::time::Duration;

use jericho_format::wire::Mac;
use siphasher::sip128::{Hasher128, SipHasher24};

use crate::Time;

/// Unit of the time in a cookie.
const UNIT: Duration = Duration::from_secs(64);

/// Makes cookies with a key that only this target knows.
#[derive(Debug)]
pub(crate) struct Cookies {
    key: [u8; 16],
}

impl Cookies {
    pub fn new(key: [u8; 16]) -> Cookies {
        Cookies { key }
    }

    /// Returns the cookie for an initiator at an address, on a link, for an export with a generation.
    pub fn give(&self, now: Time, who: (u16, Mac), export: (usize, u64)) -> [u8; 16] {
        self.cookie(now.as_secs() / UNIT.as_secs(), who, export)
    }

    /// Returns whether a cookie was given, in this unit of time or the one before.
    pub fn accept(
        &self,
        cookie: &[u8; 16],
        now: Time,
        who: (u16, Mac),
        export: (usize, u64),
    ) -> bool {
        let unit = now.as_secs() / UNIT.as_secs();
        let units = [unit, unit.saturating_sub(1)];
        // All bytes are compared, so that the time does not tell where the first difference is.
        units.iter().any(|&unit| {
            let expected = self.cookie(unit, who, export);
            let differs = expected.iter().zip(cookie).map(|(a, b)| a ^ b);
            differs.fold(0, |all, byte| all | byte) == 0
        })
    }

    /// Returns a number for an address that no other host can predict.
    pub fn hash_of(&self, mac: &Mac) -> u64 {
        let mut hasher = SipHasher24::new_with_key(&self.key);
        hasher.write(mac);
        hasher.finish128().h1
    }

    fn cookie(&self, unit: u64, (link, mac): (u16, Mac), export: (usize, u64)) -> [u8; 16] {
        let mut hasher = SipHasher24::new_with_key(&self.key);
        hasher.write_u64(unit);
        hasher.write_u16(link);
        hasher.write(&mac);
        hasher.write_u64(export.0 as u64);
        hasher.write_u64(export.1);
        hasher.finish128().as_bytes()
    }
}
