//! CRC-64/NVME: crc-fast, except on CPUs with 256-bit carry-less multiplication and no AVX-512 (Zen 3, Alder Lake). It
//! has only 128-bit code for them; `bench/landing.py` has what that makes of a verified GET.

use crc_fast::{CrcAlgorithm, Digest};

const ALGORITHM: CrcAlgorithm = CrcAlgorithm::Crc64Nvme;
/// Below, the way back from the folded bytes costs more than it saves.
#[cfg(target_arch = "x86_64")]
const FOLDED_MIN: usize = 1 << 10;

/// The checksum of bytes that come in stretches, one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Crc64 {
    register: u64,
}

impl Crc64 {
    pub fn new() -> Self {
        let register = Digest::new(ALGORITHM).get_state();
        Self { register }
    }

    pub fn update(&mut self, bytes: &[u8]) {
        let left = self.fold(bytes);
        self.register = after(self.register, left);
    }

    /// Takes in whole blocks where that is faster, and answers what is left.
    #[cfg(target_arch = "x86_64")]
    fn fold<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        if bytes.len() < FOLDED_MIN || is_x86_feature_detected!("avx512vl") {
            return bytes;
        }
        let Some((folded, left)) = fold::fold(self.register, bytes) else {
            return bytes;
        };
        self.register = after(0, &folded);
        left
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn fold<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        bytes
    }

    /// Of all bytes so far.
    pub fn sum(&self) -> u64 {
        Digest::new_with_init_state(ALGORITHM, self.register).finalize()
    }

    pub fn of(bytes: &[u8]) -> u64 {
        let mut crc = Self::new();
        crc.update(bytes);
        crc.sum()
    }
}

/// The register after these bytes.
fn after(register: u64, bytes: &[u8]) -> u64 {
    let mut digest = Digest::new_with_init_state(ALGORITHM, register);
    digest.update(bytes);
    digest.get_state()
}

/// As in Intel's "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ": a block of bytes is multiplied by the
/// power of x that is as far from it as the next block, and added to that, until one is left.
#[cfg(target_arch = "x86_64")]
mod fold {
    use std::arch::x86_64::{
        __m128i, __m256i, _MM_HINT_T0, _mm_clmulepi64_si128, _mm_cvtsi64_si128, _mm_prefetch, _mm_set_epi64x,
        _mm_xor_si128, _mm256_broadcastsi128_si256, _mm256_clmulepi64_epi128, _mm256_xor_si256,
        _mm256_zextsi128_si256,
    };

    /// Four registers of two lanes.
    const BLOCK: usize = 128;
    const LANE: usize = 16;
    const LANES: usize = BLOCK / LANE;
    /// Bytes that the CPU's cache is told of in advance: what arrived last is rarely in the nearest one any more, and by
    /// itself the CPU looks ahead no further than the page.
    const AHEAD: usize = 4096;
    /// Without its x^64; reflected, as all here: a number's lowest bit is its highest power of x.
    const POLYNOMIAL: u64 = 0x9A6C_9329_AC4B_C9B5;

    /// 16 bytes from which a register of 0 comes to where `register` comes from all whole blocks of `bytes`, and the bytes
    /// after those. None if there is no block, or this CPU can't.
    pub fn fold(register: u64, bytes: &[u8]) -> Option<([u8; LANE], &[u8])> {
        let (blocks, rest) = bytes.as_chunks();
        let (first, more) = blocks.split_first()?;
        let can = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("pclmulqdq")
            && is_x86_feature_detected!("vpclmulqdq");
        // SAFETY: the CPU has what the function needs.
        can.then(|| (unsafe { fold_blocks(register, first, more) }, rest))
    }

    #[target_feature(enable = "avx2,pclmulqdq,vpclmulqdq")]
    fn fold_blocks(register: u64, first: &[u8; BLOCK], more: &[[u8; BLOCK]]) -> [u8; LANE] {
        let mut sums = load(first);
        let start = _mm256_zextsi128_si256(_mm_cvtsi64_si128(register.cast_signed()));
        sums[0] = _mm256_xor_si256(sums[0], start);
        let by = _mm256_broadcastsi128_si256(const { Power::of_bytes(BLOCK) }.lane());
        for block in more {
            let ahead = block.as_ptr().wrapping_add(AHEAD).cast();
            _mm_prefetch::<_MM_HINT_T0>(ahead);
            _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(BLOCK / 2));
            let block = load(block);
            for (sum, new) in sums.iter_mut().zip(block) {
                let low = _mm256_clmulepi64_epi128::<0x00>(*sum, by);
                let high = _mm256_clmulepi64_epi128::<0x11>(*sum, by);
                *sum = _mm256_xor_si256(_mm256_xor_si256(low, new), high);
            }
        }
        // SAFETY: both are 128 bytes, of which every pattern is a value.
        let lanes: [__m128i; LANES] = unsafe { std::mem::transmute(sums) };
        let [.., last] = lanes;
        let far = lanes.iter().zip(const { Power::of_the_others() });
        let sum = far.fold(last, |sum, (lane, by)| {
            let low = _mm_clmulepi64_si128::<0x00>(*lane, by.lane());
            let high = _mm_clmulepi64_si128::<0x11>(*lane, by.lane());
            _mm_xor_si128(sum, _mm_xor_si128(low, high))
        });
        // SAFETY: both are 16 bytes, of which every pattern is a value.
        unsafe { std::mem::transmute(sum) }
    }

    /// Built from integers, LLVM does it in a dozen instructions, more slowly.
    #[target_feature(enable = "avx2")]
    fn load(block: &[u8; BLOCK]) -> [__m256i; 4] {
        // SAFETY: both are 128 bytes, of which every pattern is a value.
        unsafe { std::mem::transmute(*block) }
    }

    /// What the low and the high half of a lane are multiplied by to get a number of bytes further.
    #[derive(Clone, Copy)]
    struct Power {
        low: u64,
        high: u64,
    }

    impl Power {
        /// The product of two reflected numbers is one bit off, and the low half is 64 bits further away.
        const fn of_bytes(bytes: usize) -> Self {
            Self {
                low: power(8 * bytes + 63),
                high: power(8 * bytes - 1),
            }
        }

        /// From each lane of a block but the last to the last.
        const fn of_the_others() -> [Self; LANES - 1] {
            let mut powers = [Self { low: 0, high: 0 }; LANES - 1];
            let mut lane = 0;
            while lane < powers.len() {
                powers[lane] = Self::of_bytes((powers.len() - lane) * LANE);
                lane += 1;
            }
            powers
        }

        #[target_feature(enable = "sse2")]
        fn lane(self) -> __m128i {
            _mm_set_epi64x(self.high.cast_signed(), self.low.cast_signed())
        }
    }

    /// x^n modulo the polynomial.
    const fn power(n: usize) -> u64 {
        let mut value: u64 = 1 << 63;
        let mut i = 0;
        while i < n {
            value = value >> 1 ^ if value & 1 == 1 { POLYNOMIAL } else { 0 };
            i += 1;
        }
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crc_fast::checksum;
    use proptest::prelude::*;

    #[test]
    fn check_value() {
        assert_eq!(Crc64::of(b"123456789"), 0xAE8B_1486_0A79_9888);
        assert_eq!(Crc64::of(b""), checksum(ALGORITHM, b""));
    }

    proptest! {
        #[test]
        fn stretches_of_any_length_from_anywhere(
            bytes in prop::collection::vec(any::<u8>(), 20_000),
            cuts in prop::collection::vec(0_usize..20_000, 0..6),
        ) {
            let mut cuts = cuts;
            cuts.sort_unstable();
            let mut crc = Crc64::new();
            let mut at = 0;
            for cut in cuts {
                crc.update(&bytes[at..cut]);
                at = cut;
                prop_assert_eq!(crc.sum(), checksum(ALGORITHM, &bytes[..at]));
            }
        }

        /// Also where crc-fast is used.
        #[cfg(target_arch = "x86_64")]
        #[test]
        fn folded_bytes_stand_for_all(register: u64, bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
            let can = is_x86_feature_detected!("vpclmulqdq") && is_x86_feature_detected!("avx2");
            let folded = fold::fold(register, &bytes);
            prop_assert_eq!(folded.is_some(), can && bytes.len() >= 128);
            if let Some((folded, rest)) = folded {
                prop_assert_eq!(rest.len(), bytes.len() % 128);
                prop_assert_eq!(after(after(0, &folded), rest), after(register, &bytes));
            }
        }
    }
}
