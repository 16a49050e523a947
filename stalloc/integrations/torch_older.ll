; What PyTorch before 2.3 calls at the begin of a CUDA graph: it names the stream that is captured, later ones do not.

declare i64 @begin_capture(i64, i64, i64)       ; (device, first and second word of the pool's id)

define void @begin_stream_capture(i64 %device, ptr %stream, i64 %first, i64 %second) {
  %ignored = call i64 @begin_capture(i64 %device, i64 %first, i64 %second)
  ret void
}
