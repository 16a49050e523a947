; What a fork does before and after, so that the child's tables are whole: all locks are held meanwhile.

@states = external global [0 x i64]       ; addresses of states, 0 for none
@num_states = external constant i64

declare i32 @sched_yield()

; Take the lock of every state. It is the first word of a state.
define void @prepare() {
entry:
  %count = load i64, ptr @num_states
  br label %look
look:
  %i = phi i64 [0, %entry], [%following, %next]
  %row = getelementptr i64, ptr @states, i64 %i
  %state = load i64, ptr %row
  %none = icmp eq i64 %state, 0
  br i1 %none, label %next, label %take
take:
  %lock = inttoptr i64 %state to ptr
  %before = atomicrmw xchg ptr %lock, i64 1 acquire
  %held = icmp ne i64 %before, 0
  br i1 %held, label %wait, label %next
wait:
  %ignored = call i32 @sched_yield()
  br label %take
next:
  %following = add i64 %i, 1
  %more = icmp ult i64 %following, %count
  br i1 %more, label %look, label %done
done:
  ret void
}

; Give them back, in the parent and in the child.
define void @release() {
entry:
  %count = load i64, ptr @num_states
  br label %look
look:
  %i = phi i64 [0, %entry], [%following, %next]
  %row = getelementptr i64, ptr @states, i64 %i
  %state = load i64, ptr %row
  %none = icmp eq i64 %state, 0
  br i1 %none, label %next, label %give
give:
  %lock = inttoptr i64 %state to ptr
  store atomic i64 0, ptr %lock release, align 8
  br label %next
next:
  %following = add i64 %i, 1
  %more = icmp ult i64 %following, %count
  br i1 %more, label %look, label %done
done:
  ret void
}
