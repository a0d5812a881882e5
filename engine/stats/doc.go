// Package stats keeps what a trainer's analyst asks for later: one row per
// turn, fork, capture and so on, and the nodes of the tree, as Arrow tables. docs/STATS.md has them all.
//
// It promises:
//
//   - Two tables are of the daemon and not of one tree: "scheduler" and "host" have a row for
//     each interval in which something was measured, and one up to the moment of an export.
//   - Stable schemas. The columns of a table, their names, types, units and
//     meanings change only with SchemaVersion, and new columns go last. Each table
//     says its version in its schema metadata ("boxwood.schema_version"), each
//     column says "unit", "description" and, where it can be null, "null": what a
//     null means.
//   - Recording is cheap and never waits for a disk or a reader: the engine calls
//     Turn, Fork and Capture on its hot path.
//   - Bounded memory. Rows go to files below Dir when memory is half full and at the end
//     of each hour; without Dir, or when the disk is too slow, the oldest rows
//     are dropped and Dropped counts them.
//   - History outlives the daemon: Close writes what is in memory, New finds the
//     files again. A killed daemon loses at most the rows that it still held
//     (statistics are not under law 7; the table "nodes" is made from the durable
//     tree at each export and loses nothing).
//   - An export is one Arrow IPC stream: the schema first, then batches of less
//     than 2 MiB, so that a chunk fits a gRPC message; it sees the rows recorded
//     before it began.
//
// The files are Parquet, compressed with zstd, partitioned by the day (UTC) on which the first row of a
// file was recorded, each complete or absent (written aside, synced, renamed):
//
//	<Dir>/<table>-v<schema version>/date=<day>/<written at, Unix ns, 20 digits>-<rows>-<CRC-32C>.parquet
//
// Releases before wrote Arrow IPC, which is read as well:
//
//	<Dir>/<table>-v<schema version>-<written at>-<rows>.arrow
//
// Names of sandboxes, trees and nodes are plain strings; columns with a fixed
// vocabulary (verdict, status, kind ...) are dictionary encoded, and the
// dictionary is the same in every batch and file, so that batches of different
// files make one stream.
package stats
