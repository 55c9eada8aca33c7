//! Rows of a parquet file, as Hugging Face stores data sets.

use super::Values;
use parquet::file::reader::{FileReader as _, SerializedFileReader};
use parquet::record::reader::RowIter;
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The rows, one by one. What is wrong with the file itself is said by its first entry; after a
/// row that cannot be read nothing is, as its columns are no longer in step.
pub(super) fn values(file: File) -> Values {
    let opened = guarded(|| {
        let reader = SerializedFileReader::new(file)?;
        // A file may claim any number of rows.
        let rows = reader.metadata().file_metadata().num_rows();
        Ok((rows, RowIter::from_file_into(Box::new(reader))))
    });
    let (mut left, mut rows) = match opened {
        Ok(opened) => opened,
        Err(reason) => return Box::new(std::iter::once(Err(reason))),
    };
    Box::new(std::iter::from_fn(move || {
        left = left.checked_sub(1).filter(|left| *left >= 0)?;
        let row = guarded(|| rows.next().map(|row| Ok(row?.to_json_value())).transpose());
        if row.is_err() {
            left = 0;
        }
        row.transpose()
    }))
}

/// What `read` gives. The library panics on some damaged files; such a file is as bad as any
/// other, and what was half read is dropped.
fn guarded<T>(read: impl FnOnce() -> parquet::errors::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(read)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(format!("cannot be read: {error}")),
        Err(_) => Err("cannot be read: the parquet file is damaged".to_owned()),
    }
}
