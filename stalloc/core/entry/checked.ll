; A free that goes by way of Python, for STALLOC_POISON.

declare i64 @slow(i64, i64, i64)          ; enters Python with (state, address, 0)

define void @free(i64 %state, i64 %address) {
  %ignored = call i64 @slow(i64 %state, i64 %address, i64 0)
  ret void
}
