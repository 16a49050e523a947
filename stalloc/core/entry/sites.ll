; A malloc that notes by which Python stack it was called, for recordings with call sites; it stands in for the core's.
;
; A stack is known by a hash of its code objects and positions, looked up under the GIL in a table that Python fills;
; threads that Python never knew have no stack. What the linker sets: the tables, and who names a stack that is new.

@core_malloc = external constant i64      ; the address of the malloc that serves
@table = external global [0 x i64]        ; pairs of words: hash (0: empty), number of the stack
@table_mask = external constant i64       ; pairs in the table, a power of two, minus one
@calls = external global [0 x i64]        ; four words a call: state, address, bytes, number of the stack
@calls_mask = external constant i64       ; calls that there is room for, a power of two, minus one: the last ones
@num_calls = external global i64          ; calls so far

declare i64 @slow(i64, i64, i64)          ; (hash, 0, 0): the number of the stack that this thread is in; 0: unknown
declare i32 @Py_IsInitialized()
declare ptr @PyGILState_GetThisThreadState()
declare i32 @PyGILState_Ensure()
declare void @PyGILState_Release(i32)
declare ptr @PyEval_GetFrame()
declare ptr @PyFrame_GetBack(ptr)
declare ptr @PyFrame_GetCode(ptr)
declare i32 @PyFrame_GetLasti(ptr)
declare void @Py_IncRef(ptr)
declare void @Py_DecRef(ptr)

define i64 @malloc(i64 %state, i64 %bytes, i64 %stream) {
entry:
  %stack = call i64 @stack_number()
  %core = load i64, ptr @core_malloc
  %function = inttoptr i64 %core to ptr
  %address = call i64 %function(i64 %state, i64 %bytes, i64 %stream)
  %call = atomicrmw add ptr @num_calls, i64 1 acq_rel
  %mask = load i64, ptr @calls_mask       ; before the program has the address, so before anybody frees it
  %row = and i64 %call, %mask
  %first = mul i64 %row, 4
  %state.word = getelementptr i64, ptr @calls, i64 %first
  %address.word = getelementptr i64, ptr %state.word, i64 1
  %bytes.word = getelementptr i64, ptr %state.word, i64 2
  %stack.word = getelementptr i64, ptr %state.word, i64 3
  store i64 %state, ptr %state.word
  store i64 %address, ptr %address.word
  store i64 %bytes, ptr %bytes.word
  store i64 %stack, ptr %stack.word
  ret i64 %address
}

; The number of the stack of this thread, from 1 on; 0: unknown.
define i64 @stack_number() noinline {
entry:
  %there = call i32 @Py_IsInitialized()
  %gone = icmp eq i32 %there, 0
  br i1 %gone, label %none, label %known
known:
  %thread = call ptr @PyGILState_GetThisThreadState()
  %foreign = icmp eq ptr %thread, null
  br i1 %foreign, label %none, label %enter
none:
  ret i64 0
enter:
  %gil = call i32 @PyGILState_Ensure()
  %top = call ptr @PyEval_GetFrame()      ; borrowed, unlike the others
  %no.frame = icmp eq ptr %top, null
  br i1 %no.frame, label %leave, label %begin
begin:
  call void @Py_IncRef(ptr %top)
  br label %walk
walk:
  %frame = phi ptr [%top, %begin], [%back, %walk]
  %hash = phi i64 [0, %begin], [%mixed, %walk]
  %code = call ptr @PyFrame_GetCode(ptr %frame)
  call void @Py_DecRef(ptr %code)         ; the frame keeps it
  %position = call i32 @PyFrame_GetLasti(ptr %frame)
  %back = call ptr @PyFrame_GetBack(ptr %frame)
  call void @Py_DecRef(ptr %frame)        ; its caller keeps it
  %code.word = ptrtoint ptr %code to i64
  %one = xor i64 %hash, %code.word
  %two = mul i64 %one, -7046029254386353131
  %three = lshr i64 %two, 29
  %four = xor i64 %two, %three
  %where = sext i32 %position to i64
  %five = add i64 %four, %where
  %six = mul i64 %five, -4417276706812531889
  %seven = lshr i64 %six, 32
  %mixed = xor i64 %six, %seven
  %last = icmp eq ptr %back, null
  br i1 %last, label %find, label %walk
find:
  %key = or i64 %mixed, 1                 ; never 0, which is an empty pair
  %mask = load i64, ptr @table_mask
  %start = lshr i64 %mixed, 8
  br label %probe
probe:
  %tries = phi i64 [0, %find], [%tries.next, %next]
  %sum = add i64 %start, %tries
  %pair = and i64 %sum, %mask
  %first = mul i64 %pair, 2
  %key.word = getelementptr i64, ptr @table, i64 %first
  %found = load i64, ptr %key.word
  %hit = icmp eq i64 %found, %key
  br i1 %hit, label %take, label %other
take:
  %number.word = getelementptr i64, ptr %key.word, i64 1
  %number = load i64, ptr %number.word
  br label %leave
other:
  %empty = icmp eq i64 %found, 0
  br i1 %empty, label %ask, label %next
next:
  %tries.next = add i64 %tries, 1
  %many = icmp ugt i64 %tries.next, %mask
  br i1 %many, label %ask, label %probe
ask:
  %asked = call i64 @slow(i64 %key, i64 0, i64 0)
  br label %leave
leave:
  %answer = phi i64 [0, %enter], [%number, %take], [%asked, %ask]
  call void @PyGILState_Release(i32 %gil)
  ret i64 %answer
}
