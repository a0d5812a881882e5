package stats

import (
	"io"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/ipc"
	"github.com/apache/arrow/go/v17/parquet"
	"github.com/apache/arrow/go/v17/parquet/compress"
	"github.com/apache/arrow/go/v17/parquet/pqarrow"
)

// WriteArrowFile turns an exported stream into an Arrow IPC file (Feather 2).
func WriteArrowFile(stream io.Reader, file io.WriteSeeker) (rows int64, err error) {
	in, err := ipc.NewReader(stream)
	if err != nil {
		return 0, err
	}
	defer in.Release()
	out, err := ipc.NewFileWriter(file, ipc.WithSchema(in.Schema()), ipc.WithZstd())
	if err != nil {
		return 0, err
	}
	rows, err = copyBatches(in, out.Write)
	if err != nil {
		return rows, err
	}
	return rows, out.Close()
}

// WriteParquet turns an exported stream into a Parquet file like those of the history.
func WriteParquet(stream io.Reader, file io.Writer) (rows int64, err error) {
	in, err := ipc.NewReader(stream)
	if err != nil {
		return 0, err
	}
	defer in.Release()
	out, err := parquetWriter(in.Schema(), file)
	if err != nil {
		return 0, err
	}
	rows, err = copyBatches(in, out.WriteBuffered)
	if err != nil {
		return rows, err
	}
	return rows, out.Close()
}

// parquetWriter compresses with zstd. The Arrow schema goes into the file, so that units and descriptions of columns survive.
func parquetWriter(schema *arrow.Schema, file io.Writer) (*pqarrow.FileWriter, error) {
	return pqarrow.NewFileWriter(schema, writerOnly{file},
		parquet.NewWriterProperties(parquet.WithCompression(compress.Codecs.Zstd), parquet.WithCompressionLevel(1), // others need ms a column to begin
			parquet.WithMaxRowGroupLength(rowsAtOnce), parquet.WithCreatedBy("boxwood")),
		pqarrow.NewArrowWriterProperties(pqarrow.WithStoreSchema()))
}

func copyBatches(in *ipc.Reader, write func(arrow.Record) error) (rows int64, err error) {
	for in.Next() {
		rec := in.Record()
		if err := write(rec); err != nil {
			return rows, err
		}
		rows += rec.NumRows()
	}
	return rows, in.Err()
}

// writerOnly hides Close, which the Parquet writer would call on a file that
// is its caller's.
type writerOnly struct{ io.Writer }
