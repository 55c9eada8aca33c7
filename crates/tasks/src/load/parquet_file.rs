//! Rows of a parquet file, as Hugging Face stores data sets.

use super::Values;
use parquet::file::reader::{FileReader as _, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use serde_json::Value;
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The rows, one by one. If the file cannot be opened as parquet, the error is the only entry. A
/// row that cannot be read is the last entry, because the columns are not aligned after it.
pub(super) fn values(file: File) -> Values {
    let opened = guarded(|| {
        let reader = SerializedFileReader::new(file)?;
        // A damaged file may claim any number of rows, even a negative one.
        let rows = reader.metadata().file_metadata().num_rows();
        Ok((rows, RowIter::from_file_into(Box::new(reader))))
    });
    let (mut left, mut rows) = match opened {
        Ok(opened) => opened,
        Err(reason) => return Box::new(std::iter::once(Err(reason))),
    };
    Box::new(std::iter::from_fn(move || {
        left = left.checked_sub(1).filter(|left| *left >= 0)?;
        let row = guarded(|| rows.next().map(|row| Ok(object(&row?))).transpose());
        if row.is_err() {
            left = 0;
        }
        row.transpose()
    }))
}

/// A row as a JSON object.
fn object(row: &Row) -> Value {
    row.get_column_iter().map(|(name, field)| (name.clone(), value(field))).collect()
}

/// A field as JSON. Some writers store text in binary columns without annotating it, so bytes that
/// are UTF-8 become text; only other bytes become base64.
fn value(field: &Field) -> Value {
    match field {
        Field::Bytes(bytes) => match std::str::from_utf8(bytes.data()) {
            Ok(text) => text.into(),
            Err(_) => field.to_json_value(),
        },
        Field::Group(row) => object(row),
        Field::ListInternal(list) => list.elements().iter().map(value).collect(),
        field => field.to_json_value(),
    }
}

/// Calls `read` and turns a panic of the parquet library, which some damaged files cause, into an
/// error.
fn guarded<T>(read: impl FnOnce() -> parquet::errors::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(read)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(format!("cannot be read: {error}")),
        Err(_) => Err("cannot be read: the parquet file is damaged".to_owned()),
    }
}
