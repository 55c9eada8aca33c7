//! The sink `parquet`: `metrics.parquet` in the run folder, a row for each line.

use crate::error::SinkError;
use crate::follow::Sink;
use crate::line::Line;
use crate::replace::replace;
use camino::Utf8PathBuf;
use orchestrate_metrics::{ValueKind, catalogue};
use parquet::basic::Compression;
use parquet::column::writer::ColumnWriter;
use parquet::data_type::ByteArray;
use parquet::errors::{ParquetError, Result};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use std::fmt::Write as _;
use std::sync::Arc;

/// Writes the lines to a Parquet file with the columns of the CSV file. Numbers are numbers, `time` is
/// a time stamp in microseconds, and objects and lists are JSON texts.
///
/// A Parquet file cannot be continued, so each update replaces it. Lines that are journaled during
/// an update are part of the next one.
#[derive(Debug)]
pub struct ParquetFile {
    path: Utf8PathBuf,
    /// Number of lines that this process has written; `None` before the first update.
    written: Option<usize>,
}

impl ParquetFile {
    /// The sink that writes to `path`.
    pub fn new(path: Utf8PathBuf) -> Self {
        Self { path, written: None }
    }
}

impl Sink for ParquetFile {
    fn name(&self) -> &'static str {
        "parquet"
    }

    fn update(&mut self, lines: &[Line]) -> std::result::Result<(), SinkError> {
        if self.written == Some(lines.len()) {
            return Ok(());
        }
        let bytes = encoded(lines).map_err(|error| SinkError::Encoding {
            path: self.path.clone(),
            problem: error.to_string(),
        })?;
        replace(&self.path, &bytes)?;
        self.written = Some(lines.len());
        Ok(())
    }
}

/// What a column holds.
#[derive(Clone, Copy)]
enum Column {
    Time,
    Count(&'static str),
    Number(&'static str),
    Json(&'static str),
}

fn columns() -> Vec<Column> {
    let common = [
        Column::Count("schema_version"),
        Column::Time,
        Column::Count("global_step"),
        Column::Count("policy_version"),
    ];
    let metrics = catalogue().map(|metric| match metric.kind {
        ValueKind::Count => Column::Count(metric.name),
        ValueKind::Number => Column::Number(metric.name),
        ValueKind::Structured => Column::Json(metric.name),
    });
    common.into_iter().chain(metrics).collect()
}

impl Column {
    /// The column in the text form of a schema.
    fn declaration(self) -> String {
        match self {
            Self::Time => "optional int64 time (TIMESTAMP(MICROS,true));".to_owned(),
            Self::Count(name) => format!("optional int64 {name};"),
            Self::Number(name) => format!("optional double {name};"),
            Self::Json(name) => format!("optional binary {name} (STRING);"),
        }
    }

    fn write(self, writer: &mut ColumnWriter<'_>, lines: &[Line]) -> Result<()> {
        match (self, writer) {
            (Self::Time, ColumnWriter::Int64ColumnWriter(writer)) => {
                let times = lines.iter().map(|line| Some(line.time()?.as_microsecond()));
                let (levels, values) = split(times);
                writer.write_batch(&values, Some(&levels), None)?;
            }
            (Self::Count(key), ColumnWriter::Int64ColumnWriter(writer)) => {
                let (levels, values) = split(lines.iter().map(|line| line.get(key)?.as_i64()));
                writer.write_batch(&values, Some(&levels), None)?;
            }
            (Self::Number(key), ColumnWriter::DoubleColumnWriter(writer)) => {
                let (levels, values) = split(lines.iter().map(|line| line.number(key)));
                writer.write_batch(&values, Some(&levels), None)?;
            }
            (Self::Json(key), ColumnWriter::ByteArrayColumnWriter(writer)) => {
                let texts = lines.iter().map(|line| Some(line.get(key)?.to_string()));
                let (levels, values) =
                    split(texts.map(|text| Some(ByteArray::from(text?.into_bytes()))));
                writer.write_batch(&values, Some(&levels), None)?;
            }
            (Self::Time | Self::Count(_) | Self::Number(_) | Self::Json(_), _) => {
                return Err(ParquetError::General("a column differs from the schema".to_owned()));
            }
        }
        Ok(())
    }
}

/// The definition levels of a column, 0 = null, and its values without nulls.
fn split<T>(cells: impl Iterator<Item = Option<T>>) -> (Vec<i16>, Vec<T>) {
    let (mut levels, mut values) = (Vec::new(), Vec::new());
    for cell in cells {
        levels.push(i16::from(cell.is_some()));
        values.extend(cell);
    }
    (levels, values)
}

fn encoded(lines: &[Line]) -> Result<Vec<u8>> {
    let columns = columns();
    let mut schema = "message metrics {".to_owned();
    for column in &columns {
        let _ = write!(schema, " {}", column.declaration());
    }
    schema.push_str(" }");
    let schema = Arc::new(parse_message_type(&schema)?);
    let properties = WriterProperties::builder().set_compression(Compression::SNAPPY).build();
    let mut file = SerializedFileWriter::new(Vec::new(), schema, Arc::new(properties))?;
    let mut rows = file.next_row_group()?;
    let mut columns = columns.into_iter();
    while let Some(mut writer) = rows.next_column()? {
        if let Some(column) = columns.next() {
            column.write(writer.untyped(), lines)?;
        }
        writer.close()?;
    }
    rows.close()?;
    file.into_inner()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::line::tests::run_of;
    use parquet::file::reader::{FileReader as _, SerializedFileReader};
    use parquet::record::Field;
    use std::collections::HashMap;

    #[test]
    fn rows_are_the_lines_with_typed_values() {
        let folder = tempfile::tempdir().unwrap();
        let path = Utf8PathBuf::from_path_buf(folder.path().join("metrics.parquet")).unwrap();
        let lines = run_of(3);
        let mut sink = ParquetFile::new(path.clone());
        for seen in [0, 1, 1, 4] {
            sink.update(&lines[..seen]).unwrap();
            let file = std::fs::File::open(&path).unwrap();
            let reader = SerializedFileReader::new(file).unwrap();
            let rows: Vec<_> = reader.get_row_iter(None).unwrap().map(Result::unwrap).collect();
            assert_eq!(rows.len(), seen);
            for (line, row) in lines.iter().zip(&rows) {
                let fields: HashMap<&String, &Field> = row.get_column_iter().collect();
                let field = |key: &str| fields[&key.to_owned()].clone();
                assert_eq!(field("global_step"), Field::Long(line.step().into()));
                let micros = line.time().unwrap().as_microsecond();
                assert_eq!(field("time"), Field::TimestampMicros(micros));
                let reward = line.number("reward_mean").map_or(Field::Null, Field::Double);
                assert_eq!(field("reward_mean"), reward);
                let ratio = line.get("ratio").map(|value| Field::Str(value.to_string()));
                assert_eq!(field("ratio"), ratio.unwrap_or(Field::Null));
            }
        }
    }
}
