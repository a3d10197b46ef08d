"""Read the files of rows that hold samples."""
