//! One bit for each chunk: what lookups answer.

use super::hex;

/// One bit a chunk: bit i is `byte[i / 8] >> (i % 8) & 1`. Padding is zero.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Mask {
    len: usize,
    bytes: Vec<u8>,
}

/// Bytes that are not a mask of the asked length.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MaskError {
    #[error("a mask of {bits} bits has {expected} bytes, not {actual}")]
    Length {
        bits: usize,
        expected: usize,
        actual: usize,
    },
    #[error("the padding bits after bit {bits} must be zero")]
    Padding { bits: usize },
}

impl Mask {
    /// `len` bits, all zero.
    pub fn new(len: usize) -> Self {
        Self {
            len,
            bytes: vec![0; len.div_ceil(8)],
        }
    }

    /// Reads the wire form.
    pub fn from_bytes(len: usize, bytes: &[u8]) -> Result<Self, MaskError> {
        let expected = len.div_ceil(8);
        if bytes.len() != expected {
            return Err(MaskError::Length {
                bits: len,
                expected,
                actual: bytes.len(),
            });
        }
        if !len.is_multiple_of(8) && bytes[expected - 1] >> (len % 8) != 0 {
            return Err(MaskError::Padding { bits: len });
        }
        Ok(Self {
            len,
            bytes: bytes.to_vec(),
        })
    }

    /// Number of bits, not of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bit `i`; false past the end.
    pub fn get(&self, i: usize) -> bool {
        i < self.len && self.bytes[i / 8] >> (i % 8) & 1 == 1
    }

    /// Sets bit `i`. Panics past the end.
    pub fn set(&mut self, i: usize) {
        assert!(i < self.len, "bit {i} of a mask of {}", self.len);
        self.bytes[i / 8] |= 1 << (i % 8);
    }

    /// Sets bits `0..end`. Panics past the end.
    pub fn set_prefix(&mut self, end: usize) {
        assert!(end <= self.len, "prefix {end} of a mask of {}", self.len);
        self.bytes[..end / 8].fill(0xff);
        if !end.is_multiple_of(8) {
            self.bytes[end / 8] |= (1 << (end % 8)) - 1;
        }
    }

    /// Number of ones.
    pub fn count(&self) -> usize {
        self.bytes.iter().map(|byte| byte.count_ones() as usize).sum()
    }

    /// Length of the leading run of ones.
    pub fn prefix(&self) -> usize {
        let full = self.bytes.iter().take_while(|&&byte| byte == 0xff).count();
        let rest = self
            .bytes
            .get(full)
            .map_or(0, |byte| byte.trailing_ones() as usize);
        full * 8 + rest
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub fn to_hex(&self) -> String {
        hex::encode(&self.bytes)
    }
}

impl FromIterator<bool> for Mask {
    fn from_iter<I: IntoIterator<Item = bool>>(bits: I) -> Self {
        let bits = bits.into_iter();
        let mut bytes = Vec::with_capacity(bits.size_hint().0.div_ceil(8));
        let (mut len, mut last) = (0_usize, 0);
        for bit in bits {
            last |= u8::from(bit) << (len % 8);
            len += 1;
            if len.is_multiple_of(8) {
                bytes.push(std::mem::take(&mut last));
            }
        }
        if !len.is_multiple_of(8) {
            bytes.push(last);
        }
        Self { len, bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn agrees_with_a_list_of_bools(bits in prop::collection::vec(any::<bool>(), 0..300)) {
            let mask: Mask = bits.iter().copied().collect();
            prop_assert_eq!(mask.len(), bits.len());
            prop_assert_eq!(mask.as_bytes().len(), bits.len().div_ceil(8));
            for (i, &bit) in bits.iter().enumerate() {
                prop_assert_eq!(mask.get(i), bit);
            }
            prop_assert_eq!(mask.count(), bits.iter().filter(|&&bit| bit).count());
            prop_assert_eq!(mask.prefix(), bits.iter().take_while(|&&bit| bit).count());
            prop_assert_eq!(Mask::from_bytes(bits.len(), mask.as_bytes()), Ok(mask));
        }

        #[test]
        fn a_prefix_is_its_ones(len in 0_usize..200, end in 0_usize..200) {
            let end = end.min(len);
            let mut mask = Mask::new(len);
            mask.set_prefix(end);
            prop_assert_eq!(mask, (0..len).map(|i| i < end).collect::<Mask>());
        }
    }

    #[test]
    fn refuses_padding_and_lengths() {
        assert_eq!(
            Mask::from_bytes(3, &[0b1000]),
            Err(MaskError::Padding { bits: 3 })
        );
        assert_eq!(
            Mask::from_bytes(9, &[0]),
            Err(MaskError::Length {
                bits: 9,
                expected: 2,
                actual: 1
            })
        );
        assert!(Mask::from_bytes(8, &[0xff]).is_ok());
        assert!(!Mask::new(3).get(3));
    }
}
