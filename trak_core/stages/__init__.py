"""One module a job: paths and plain values in, one artifact out."""
