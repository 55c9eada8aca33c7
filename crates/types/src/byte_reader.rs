/// Reads little-endian values from the front of a slice. A read that fails takes nothing.
#[derive(Debug, Clone)]
pub struct ByteReader<'a> {
    rest: &'a [u8],
}

/// A slice ended before the value that was to be read from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it ends too early")]
pub struct EndsEarly;

impl<'a> ByteReader<'a> {
    /// A reader of all bytes of a slice.
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// The bytes that have not been read.
    pub const fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// The next `count` bytes.
    ///
    /// # Errors
    /// [`EndsEarly`].
    pub fn take(&mut self, count: usize) -> Result<&'a [u8], EndsEarly> {
        let (taken, rest) = self.rest.split_at_checked(count).ok_or(EndsEarly)?;
        self.rest = rest;
        Ok(taken)
    }

    /// The next `N` bytes.
    ///
    /// # Errors
    /// [`EndsEarly`].
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], EndsEarly> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or(EndsEarly)?;
        self.rest = rest;
        Ok(*taken)
    }

    /// The next `count` values of `N` bytes each. Allocates only for values that are there.
    ///
    /// # Errors
    /// [`EndsEarly`].
    pub fn values<T, const N: usize>(
        &mut self,
        count: usize,
        from: fn([u8; N]) -> T,
    ) -> Result<Vec<T>, EndsEarly> {
        let bytes = self.take(count.checked_mul(N).ok_or(EndsEarly)?)?;
        let (values, _) = bytes.as_chunks::<N>();
        Ok(values.iter().map(|value| from(*value)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type OfEachKind = (u16, Vec<u8>, Vec<u32>, Vec<u8>);

    /// Reads one value of each kind.
    fn read(bytes: &[u8]) -> Result<OfEachKind, EndsEarly> {
        let mut reader = ByteReader::new(bytes);
        let number = u16::from_le_bytes(reader.array()?);
        let taken = reader.take(3)?.to_vec();
        let values = reader.values(2, u32::from_le_bytes)?;
        Ok((number, taken, values, reader.rest().to_vec()))
    }

    const BYTES: [u8; 14] = [1, 2, 3, 4, 5, 6, 0, 0, 0, 7, 0, 0, 1, 9];

    #[test]
    fn values_are_read_in_order_and_little_endian() {
        let expected = (0x0201, vec![3, 4, 5], vec![6, 0x0100_0007], vec![9]);
        assert_eq!(read(&BYTES), Ok(expected));
    }

    #[test]
    fn every_truncated_input_ends_too_early() {
        for length in 0..BYTES.len() - 1 {
            assert_eq!(read(&BYTES[..length]), Err(EndsEarly), "{length} bytes");
        }
    }

    #[test]
    fn a_failed_read_takes_nothing() {
        let mut reader = ByteReader::new(&BYTES);
        assert_eq!(reader.take(BYTES.len() + 1), Err(EndsEarly));
        assert_eq!(reader.array::<15>(), Err(EndsEarly));
        assert_eq!(reader.values(4, u32::from_le_bytes), Err(EndsEarly));
        assert_eq!(reader.rest(), BYTES);
    }

    #[test]
    fn a_count_whose_bytes_cannot_be_counted_is_too_large() {
        let mut reader = ByteReader::new(&BYTES);
        for count in [usize::MAX, usize::MAX / 4 + 1, usize::MAX / 8 + 2] {
            assert_eq!(reader.values(count, u32::from_le_bytes), Err(EndsEarly));
            assert_eq!(reader.values(count, u64::from_le_bytes), Err(EndsEarly));
        }
        assert_eq!(reader.rest(), BYTES);
    }

    #[test]
    fn nothing_can_be_read_from_an_empty_slice() {
        let mut reader = ByteReader::new(&[]);
        assert_eq!(reader.take(0), Ok(&[][..]));
        assert_eq!(reader.values(0, u64::from_le_bytes), Ok(vec![]));
        assert_eq!(reader.array::<1>(), Err(EndsEarly));
    }
}
