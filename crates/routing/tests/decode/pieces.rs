//! Memory layout of decoded rows.

use super::{shape, varied};
use orchestrate_routing::{BLOCK_ROWS, RoutedRows};

#[test]
fn pieces_end_at_block_boundaries_and_have_capacity_for_their_block() {
    let shape = shape(2, &[0, 1], 8, 2);
    for (start, rows, lengths) in [
        (0, 0, vec![]),
        (0, 1, vec![1]),
        (0, 64, vec![64]),
        (0, 65, vec![64, 1]),
        (63, 2, vec![1, 1]),
        (64, 64, vec![64]),
        (70, 200, vec![58, 64, 64, 14]),
    ] {
        let made = RoutedRows::from_ids(&shape, start, &varied(&shape, rows)).unwrap();
        let bytes = made.to_vec();
        assert_eq!(bytes.len(), rows * shape.row_bytes());
        for position in start..start + rows {
            let at = (position - start) * shape.row_bytes();
            assert_eq!(made.row(position).unwrap(), &bytes[at..at + shape.row_bytes()]);
        }
        assert_eq!(made.row(start + rows), None);
        assert_eq!(start.checked_sub(1).and_then(|before| made.row(before)), None);
        assert_eq!(made.row(usize::MAX), None);
        assert!(made.chunks().flatten().eq(&bytes));
        let mut position = start;
        for (piece, rows) in made.into_pieces().iter().zip(lengths) {
            assert_eq!(piece.len(), rows * shape.row_bytes());
            let room = BLOCK_ROWS - position % BLOCK_ROWS;
            assert!(piece.capacity() >= room * shape.row_bytes());
            position += rows;
        }
        assert_eq!(position, start + rows);
    }
}
