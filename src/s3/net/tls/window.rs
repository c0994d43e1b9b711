//! A buffer of fixed length that bytes pass through.

/// Bytes on their way through a buffer of fixed length: they come in at the end and go out at the start.
pub(super) struct ByteWindow {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl ByteWindow {
    /// The memory is the system's zero pages until it is used.
    pub fn new(len: usize) -> Self {
        Self {
            bytes: vec![0; len].into_boxed_slice(),
            start: 0,
            end: 0,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    pub fn is_full(&self) -> bool {
        self.end - self.start == self.bytes.len()
    }

    pub fn filled(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    pub fn filled_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.end]
    }

    /// All the room there is, after what is in it moved to the front.
    pub fn room(&mut self) -> &mut [u8] {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        &mut self.bytes[self.end..]
    }

    /// The first `len` bytes of the room are filled now.
    pub fn grow(&mut self, len: usize) {
        self.end = (self.end + len).min(self.bytes.len());
    }

    /// The first `len` bytes are done with.
    pub fn consume(&mut self, len: usize) {
        self.start = (self.start + len).min(self.end);
    }
}
