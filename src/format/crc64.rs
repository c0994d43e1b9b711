//! CRC-64/NVME: crc-fast, and for long stretches our own way where the CPU has vectors for it. crc-fast has only 128-bit
//! code for CPUs without AVX-512 (Zen 3, Alder Lake), and with AVX-512 it waits for the caches; `bench/landing.py` has
//! what that makes of a verified GET.

use crc_fast::{CrcAlgorithm, Digest};

const ALGORITHM: CrcAlgorithm = CrcAlgorithm::Crc64Nvme;

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

    /// Takes in whole regions, and answers what is left.
    #[cfg(target_arch = "x86_64")]
    fn fold<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        let Some((folded, left)) = fold::kernels()
            .next()
            .and_then(|kernel| kernel.fold(self.register, bytes))
        else {
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

/// Puts two checksums together, the second always of the same length: the first is multiplied by a power of x, which is
/// made once, not for each stretch.
pub struct Append {
    power: u64,
}

impl Append {
    pub fn new(len: usize) -> Self {
        // x^8, and on with its squares.
        let (mut square, mut power) = (ONE >> 8, ONE);
        for bit in 0..usize::BITS {
            if len >> bit & 1 == 1 {
                power = multiply(power, square);
            }
            square = multiply(square, square);
        }
        Self { power }
    }

    /// Of all bytes, from the checksum of the first ones and that of the last `len`.
    pub fn sum(&self, first: u64, second: u64) -> u64 {
        multiply(first, self.power) ^ second
    }
}

/// Reflected, as all here: the highest bit is x^0.
const ONE: u64 = 1 << 63;
/// Without its x^64.
const POLYNOMIAL: u64 = 0x9A6C_9329_AC4B_C9B5;

/// Of polynomials, modulo the checksum's.
fn multiply(a: u64, mut b: u64) -> u64 {
    let mut product = 0;
    for bit in 0..u64::BITS {
        if a & ONE >> bit != 0 {
            product ^= b;
        }
        b = (b >> 1) ^ ((b & 1) * POLYNOMIAL);
    }
    product
}

/// The register after these bytes.
fn after(register: u64, bytes: &[u8]) -> u64 {
    let mut digest = Digest::new_with_init_state(ALGORITHM, register);
    digest.update(bytes);
    digest.get_state()
}

/// As in Intel's "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ": bytes are multiplied by the power of x
/// that is as far from them as later ones, and added to those, until the last are left. What has arrived is rarely in
/// the nearest cache any more, and one stream of bytes would wait for each line of it; so several go through a region
/// side by side, and each asks for its line of the next one.
#[cfg(target_arch = "x86_64")]
#[expect(
    clippy::inline_always,
    reason = "a function of its own could use only what every CPU has"
)]
mod fold {
    use super::POLYNOMIAL;
    use std::arch::x86_64::{
        __m128i, __m256i, __m512i, _MM_HINT_T0, _mm_clmulepi64_si128, _mm_prefetch, _mm_set_epi64x,
        _mm_xor_si128, _mm256_broadcastsi128_si256, _mm256_clmulepi64_epi128, _mm256_xor_si256,
        _mm512_broadcast_i32x4, _mm512_clmulepi64_epi128, _mm512_ternarylogic_epi64,
    };
    use std::mem::{transmute, zeroed};

    const STREAMS: usize = 8;
    /// Bytes of a region that one stream goes through. The nearest cache has room for two regions.
    const STRIDE: usize = 2048;
    const REGION: usize = STREAMS * STRIDE;
    /// Bytes that are one number; reflected, as all here: its lowest bit is its highest power of x.
    const LANE: usize = 16;

    /// From the lane before the regions to the one that stands for it and them. This CPU can run it.
    #[derive(Clone, Copy)]
    pub struct Kernel(unsafe fn(__m128i, &[[u8; REGION]]) -> __m128i);

    /// The fastest first.
    pub fn kernels() -> impl Iterator<Item = Kernel> {
        let any = is_x86_feature_detected!("pclmulqdq") && is_x86_feature_detected!("vpclmulqdq");
        let wide = any && is_x86_feature_detected!("avx512f");
        let narrow = any && is_x86_feature_detected!("avx2");
        let kernels = [
            wide.then_some(Kernel(fold_512)),
            narrow.then_some(Kernel(fold_256)),
        ];
        kernels.into_iter().flatten()
    }

    impl Kernel {
        /// 16 bytes from which a register of 0 comes to where `register` comes from 16 bytes and all whole regions after
        /// them, and the bytes that are left. None if there is no region.
        pub fn fold(self, register: u64, bytes: &[u8]) -> Option<([u8; LANE], &[u8])> {
            let (first, bytes) = bytes.split_first_chunk::<LANE>()?;
            let (regions, left) = bytes.as_chunks();
            if regions.is_empty() {
                return None;
            }
            let first = u128::from_le_bytes(*first) ^ u128::from(register);
            // SAFETY: the CPU can run it; and any 16 bytes are a lane, and the other way round.
            let last: [u8; LANE] = unsafe { transmute(self.0(transmute::<u128, __m128i>(first), regions)) };
            Some((last, left))
        }
    }

    #[target_feature(enable = "avx512f,pclmulqdq,vpclmulqdq")]
    fn fold_512(before: __m128i, regions: &[[u8; REGION]]) -> __m128i {
        // SAFETY: a CPU that runs this has the vector.
        unsafe { fold_regions::<__m512i>(before, regions) }
    }

    #[target_feature(enable = "avx2,pclmulqdq,vpclmulqdq")]
    fn fold_256(before: __m128i, regions: &[[u8; REGION]]) -> __m128i {
        // SAFETY: as above.
        unsafe { fold_regions::<__m256i>(before, regions) }
    }

    /// # Safety
    ///
    /// The CPU has V, and carry-less multiplication of it and of a lane.
    #[inline(always)]
    unsafe fn fold_regions<V: Vector>(mut before: __m128i, regions: &[[u8; REGION]]) -> __m128i {
        // SAFETY: as promised; all that is read is within a region, and any bytes are a vector, or lanes.
        unsafe {
            let by_vector = V::all(const { Power::of_bytes(size_of::<V>()) }.lane());
            let by_stride = const { Power::of_bytes(STRIDE) }.lane();
            let by_lane = const { Power::of_bytes(LANE) }.lane();
            for region in regions {
                let mut sums = [zeroed::<V>(); STREAMS];
                for at in (0..STRIDE).step_by(size_of::<V>()) {
                    for (stream, sum) in sums.iter_mut().enumerate() {
                        let bytes = region.as_ptr().add(stream * STRIDE + at);
                        _mm_prefetch::<_MM_HINT_T0>(bytes.wrapping_add(REGION).cast());
                        *sum = bytes.cast::<V>().read_unaligned().add_product(*sum, by_vector);
                    }
                }
                for sum in &sums {
                    let lanes = std::slice::from_raw_parts(
                        (&raw const *sum).cast::<__m128i>(),
                        size_of::<V>() / LANE,
                    );
                    let sum = lanes[1..]
                        .iter()
                        .fold(lanes[0], |sum, lane| add_product(*lane, sum, by_lane));
                    before = add_product(sum, before, by_stride);
                }
            }
            before
        }
    }

    #[target_feature(enable = "pclmulqdq")]
    fn add_product(lane: __m128i, number: __m128i, by: __m128i) -> __m128i {
        let low = _mm_clmulepi64_si128::<0x00>(number, by);
        let high = _mm_clmulepi64_si128::<0x11>(number, by);
        _mm_xor_si128(_mm_xor_si128(low, lane), high)
    }

    /// Several lanes.
    ///
    /// # Safety
    ///
    /// Its functions run on CPUs that have such vectors, with carry-less multiplication.
    trait Vector: Copy {
        /// The lane, over and over.
        unsafe fn all(lane: __m128i) -> Self;
        /// In each lane.
        unsafe fn add_product(self, number: Self, by: Self) -> Self;
    }

    impl Vector for __m256i {
        #[inline(always)]
        unsafe fn all(lane: __m128i) -> Self {
            // SAFETY: as promised.
            unsafe { _mm256_broadcastsi128_si256(lane) }
        }

        #[inline(always)]
        unsafe fn add_product(self, number: Self, by: Self) -> Self {
            // SAFETY: as promised.
            unsafe {
                let low = _mm256_clmulepi64_epi128::<0x00>(number, by);
                let high = _mm256_clmulepi64_epi128::<0x11>(number, by);
                _mm256_xor_si256(_mm256_xor_si256(low, self), high)
            }
        }
    }

    impl Vector for __m512i {
        #[inline(always)]
        unsafe fn all(lane: __m128i) -> Self {
            // SAFETY: as promised.
            unsafe { _mm512_broadcast_i32x4(lane) }
        }

        #[inline(always)]
        unsafe fn add_product(self, number: Self, by: Self) -> Self {
            /// In each bit: the first operand's, the second's and the third's, added.
            const ADD: i32 = 0x96;
            // SAFETY: as promised.
            unsafe {
                let low = _mm512_clmulepi64_epi128::<0x00>(number, by);
                let high = _mm512_clmulepi64_epi128::<0x11>(number, by);
                _mm512_ternarylogic_epi64::<ADD>(low, self, high)
            }
        }
    }

    /// The factors of a lane's low and high half for a number of bytes further.
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
            bytes in prop::collection::vec(any::<u8>(), 80_000),
            cuts in prop::collection::vec(0_usize..80_000, 0..6),
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

        /// With each kernel that this CPU can run, not only the fastest.
        #[cfg(target_arch = "x86_64")]
        #[test]
        fn folded_bytes_stand_for_all(register: u64, bytes in prop::collection::vec(any::<u8>(), 0..80_000)) {
            for kernel in fold::kernels() {
                let folded = kernel.fold(register, &bytes);
                prop_assert_eq!(folded.is_some(), bytes.len() >= 16 + (16 << 10));
                if let Some((folded, rest)) = folded {
                    prop_assert_eq!(rest.len(), (bytes.len() - 16) % (16 << 10));
                    prop_assert_eq!(after(after(0, &folded), rest), after(register, &bytes));
                }
            }
        }
    }
}
