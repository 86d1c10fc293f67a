# replay.awk - read pyops.h, write one line KERNEL(number, name, call) for every function that ends in a stream.
# So replay.c can call each kernel with its arguments from an array, checked by the compiler against the prototype,
# and no prototype is written twice.
{ sub(/^[ \t]*#.*/, ""); text = text " " $0 }
END {
    while (match(text, /\/\*[^*]*\*+([^\/*][^*]*\*+)*\//)) text = substr(text, 1, RSTART - 1) " " substr(text, RSTART + RLENGTH)
    count = split(text, statements, ";")
    number = 0
    for (i = 1; i <= count; i++) {
        if (!match(statements[i], /PYOPS_API +pyops_status +pyops_[a-z0-9_]+\(.*void \*stream\)/)) continue
        statement = substr(statements[i], RSTART, RLENGTH)
        match(statement, /pyops_[a-z0-9_]+\(/)
        name = substr(statement, RSTART, RLENGTH - 1)
        arguments = substr(statement, RSTART + RLENGTH)
        n = split(arguments, argument, ",")
        call = name "("
        for (j = 1; j < n; j++) {
            field = argument[j] ~ /\*/ ? "pointer" : argument[j] ~ /float/ ? "real" : "integer"
            cast = ""                           # C++ requires one for pointers
            if (field == "pointer") {
                cast = argument[j]
                sub(/[a-z0-9_]+ *$/, "", cast)
                cast = "(" cast ")"
            }
            call = call cast "v[" (j - 1) "]." field ", "
        }
        if (name != "pyops_replay") print "KERNEL(" number++ ", " name ", " call "stream))"
    }
}
