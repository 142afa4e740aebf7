-- Declaring and writing.

-- The largest group, of several the one whose name comes first, and its rows; '', 0 where there is none.
local function largest_group(K)
  local flat, name, rows = redis.call('HGETALL', K .. 'g'), '', 0
  for j = 1, #flat, 2 do
    local n = unpack_(flat[j + 1])[2]
    if n > rows or (n == rows and flat[j] < name) then name, rows = flat[j], n end
  end
  return name, rows
end

-- Payload: {doc, gsize, nt, anew}. ARGV[3] is the version that the declaration was united with; '0': there was no partition.
-- anew: types and group size are not those of the version before, which only a partition without rows allows.
local function register(K, P, args, now)
  if P and P.ver ~= args[3] then return schema(P) end
  if not P and args[3] ~= '0' then return { UNKNOWN, '' } end
  local a = unpack_(args[4])
  local had = P and P.gsize
  if P and a[4] then
    if redis.call('HLEN', K .. 'i') > 0 then return { ERROR, pack({ '', 0 }) } end
  elseif P and not had and a[2] > 0 then
    local name, rows = largest_group(K)
    if rows > a[2] then return { ERROR, pack({ name, rows }) } end
  end
  P = P or fresh(K, now)
  if tonumber(P.ver) == 0 then redis.call('HSET', K .. 'p', 'born', string.format('%.0f', now)) end
  set_schema(P, a[1], a[2], a[3])
  if P.gsize ~= had then regroup(P) end
  save(P)
  notify(K)
  return { OK, P.ver }
end

local function describe(K, P)
  if not P then return { UNKNOWN, '' } end
  local v = redis.call('HMGET', K .. 'p', 'doc', 'born')
  return { OK, pack({ P.ver, v[1], v[2], redis.call('HLEN', K .. 'i'), string.format('%.0f', P.bytes) }) }
end

-- Payload: ids. How many of them are new, beside how many samples are there.
local function place(K, P, args)
  if not P then return args[3] == '0' and { OK, pack({ 0, #unpack_(args[4]) }) } or { UNKNOWN, '' } end
  if P.ver ~= args[3] then return schema(P) end
  local rids, new = hmget(K .. 'i', unpack_(args[4])), 0
  for _, rid in ipairs(rids) do if not rid then new = new + 1 end end
  return { OK, pack({ redis.call('HLEN', K .. 'i'), new }) }
end

-- What new cells replace: returns the row's cells, the bytes that went, and adds what died to `dead`.
local function replace_cells(old, new, dead)
  local gone, out, bytes = {}, unpack_(new), 0
  for _, piece in ipairs(out) do
    for _, f in ipairs(piece[3]) do gone[f] = true end
  end
  for _, piece in ipairs(unpack_(old)) do
    local fields, sizes, lost = {}, {}, {}
    for j, f in ipairs(piece[3]) do
      if gone[f] then
        lost[#lost + 1] = f
        bytes = bytes + piece[4][j]
      else
        fields[#fields + 1] = f
        sizes[#sizes + 1] = piece[4][j]
      end
    end
    if #fields == 0 then
      dead[#dead + 1] = { piece[1], piece[2], false }
    else
      if #lost > 0 then dead[#dead + 1] = { piece[1], piece[2], lost } end
      out[#out + 1] = { piece[1], piece[2], fields, sizes }
    end
  end
  return pack(out), bytes
end

-- Everything about the rows that a put names and that exist already.
local function load_old(P, rids)
  local at, ask = {}, {}
  for i, rid in ipairs(rids) do if rid then at[#at + 1] = i; ask[#ask + 1] = rid end end
  local old = {}
  if #ask == 0 then return old end
  local r, c, t = hmget(P.K .. 'r', ask), hmget(P.K .. 'c', ask), hmget(P.K .. 't', ask)
  for j, i in ipairs(at) do old[i] = { unpack_(r[j]), c[j], t[j] } end
  return old
end

local function check_groups(P, a, old, groups)
  local sizes = {}
  for i, name in ipairs(a.groups) do
    local expected = a.exp and a.exp[i]
    if expected and expected > P.gsize then return { 'expected', i, expected, P.gsize } end
    local row = old[i] and old[i][1]
    if not row or (a.told and a.told[i] > 0 and name ~= row[GROUP]) then
      sizes[name] = (sizes[name] or groups[name][2]) + 1
      if sizes[name] > P.gsize then return { 'group', i, sizes[name], P.gsize } end
    end
  end
  return nil
end

-- Merges what a put says about one row into it. COMMITTED is 2 where it is tagged so that it is not. The row joins the group it is told.
local function stamp(P, a, i, seq, rid, row, groups)
  if a.com and a.com[i] > 0 then row[COMMITTED] = a.com[i] end
  if a.st and a.st[i] > 0 then row[FAILED] = a.st[i] == 1 and 1 or 0 end
  if a.cr and a.cr[i] then row[CREATED] = a.cr[i] end
  if a.told and a.told[i] == 2 and a.groups[i] ~= row[GROUP] then
    leave(P, groups[row[GROUP]], row[GROUP], rid)
    row[GROUP] = a.groups[i]
    join(P, groups[row[GROUP]], row[GROUP], rid)
  end
  if a.exp and a.exp[i] then row[EXPECTED] = math.max(a.exp[i], 0) end
  local g = groups[row[GROUP]]
  if row[EXPECTED] > g[1] then g[1] = row[EXPECTED] end
  note_failed(P, g, rid, row[FAILED] == 1)
  if row[COMMITTED] == 2 or row[FAILED] == 1 then
    row[ELIGIBLE] = 0
  elseif row[ELIGIBLE] == 0 then
    row[ELIGIBLE] = seq
  end
end

-- Which rows a put may write by the lives that it is bound to, and which not; by position. Without a life any will do.
local function bound(a, rids)
  local keep, unfit = {}, {}
  for i = 1, #a.ids do
    local life, fits = a.lives and a.lives[i], rids[i]
    if a.only == 'new' then fits = not fits elseif fits and life then fits = life == rids[i] end
    if fits then keep[#keep + 1] = i else unfit[#unfit + 1] = i end
  end
  return keep, unfit
end

-- The columns that have an entry per row.
local COLUMNS = { 'ids', 'groups', 'told', 'exp', 'com', 'st', 'cr', 'tags', 'cells', 'bytes', 'shape' }

-- Leaves rows out of a put; what was written for them dies.
local function leave_out(a, keep, unfit, dead)
  for _, i in ipairs(unfit) do
    for _, piece in ipairs(a.cells and a.cells[i] and unpack_(a.cells[i]) or {}) do
      dead[#dead + 1] = { piece[1], piece[2], false }
    end
  end
  for _, name in ipairs(COLUMNS) do
    local column = a[name]
    if column then
      local kept = {}
      for j, i in ipairs(keep) do kept[j] = column[i] end
      a[name] = kept
    end
  end
end

-- The answer of a put of n rows: their incarnations, from `first` on where all are new, and which of them are new; the
-- version of the schema, where it may have changed.
local function published(n, first, rids, new, dead, ver)
  return { OK, pack({ first and string.format('%.0f', first) or false, n, rids, new, dead, ver }) }
end

-- Payload: columns over the rows (absent where they say nothing), see publishing.py. Checked first, then changed.
local function publish(K, P, args, now)
  if not P then
    if args[3] ~= '0' then return { UNKNOWN, '' } end
    P = fresh(K, now)
  elseif P.ver ~= args[3] then
    return schema(P)
  end
  local a = unpack_(args[4])
  local total, at, dead = #a.ids, nil, {} -- at: the position in the put of each row that is written, where not all are
  local rids = hmget(K .. 'i', a.ids)
  if a.only then
    local keep, unfit = bound(a, rids)
    if #unfit > 0 then
      if a.only == 'new' or not a.skip then return { ERROR, pack({ 'bound', unfit }) } end
      leave_out(a, keep, unfit, dead)
      local found = rids
      at, rids = keep, {}
      for j, i in ipairs(keep) do rids[j] = found[i] end
    end
    -- Remembered: a row that lives by the time when this is sent again is left out as well.
    if #a.ids == 0 then return published(total, false, {}, {}, dead, false), false end
    if a.clash then return { ERROR, pack({ 'clash' }) } end
  end
  local n, new = #a.ids, {}
  for i = 1, n do if not rids[i] then new[#new + 1] = i end end
  local held = redis.call('HLEN', K .. 'i') + a.elsewhere
  if #new > 0 and held + #new > a.capacity then return { ERROR, pack({ 'full', held, #new }) } end
  local old, groups, names = load_old(P, rids), {}, {}
  for i = 1, n do
    names[#names + 1] = a.groups[i]
    if old[i] then names[#names + 1] = old[i][1][GROUP] end
  end
  load_groups(P, names, groups)
  if P.gsize then
    local wrong = check_groups(P, a, old, groups)
    if wrong then
      wrong[2] = at and at[wrong[2]] or wrong[2]
      return { ERROR, pack(wrong) }
    end
  end
  -- from here on everything happens
  if a.doc then
    if P.ver == '0' then redis.call('HSET', K .. 'p', 'born', string.format('%.0f', now)) end
    set_schema(P, a.doc, a.gsize, a.nt)
  end
  local first, seq = P.inc, P.seq + 1
  local list, is_new, added = {}, {}, 0
  local set_i, set_r, set_c, set_t = {}, {}, {}, {}
  for i = 1, n do
    if old[i] then
      list[i] = old[i][1]
    else
      P.inc = P.inc + 1
      local rid = string.format('%016.0f', P.inc)
      rids[i], is_new[i] = rid, true
      list[i] = { a.ids[i], a.groups[i], a.owner, now / 1000000, 0, 0, 1, 0, 0, 0, {} }
      join(P, groups[a.groups[i]], a.groups[i], rid)
      set_i[#set_i + 1] = a.ids[i]; set_i[#set_i + 1] = rid
    end
  end
  for i = 1, n do
    local row, rid = list[i], rids[i]
    local cells, before = a.cells and a.cells[i], old[i]
    if cells then
      local fields, bytes = a.shapes[a.shape and a.shape[i] or 1], a.bytes[i]
      for j = 1, #fields do
        local f = fields[j]
        if not row[PROD][f] then row[PROD][f] = seq end
      end
      if before and before[2] then
        local went
        cells, went = replace_cells(before[2], cells, dead)
        bytes = bytes - went
      end
      row[BYTES] = row[BYTES] + bytes
      added = added + bytes
      set_c[#set_c + 1] = rid; set_c[#set_c + 1] = cells
    end
    if not before then row[SIZE0] = row[BYTES] end
    stamp(P, a, i, seq, rid, row, groups)
    set_r[#set_r + 1] = rid; set_r[#set_r + 1] = pack(row)
    local tags = a.tags and a.tags[i]
    if tags then
      if before and before[3] then tags = splice(before[3], tags) end
      set_t[#set_t + 1] = rid; set_t[#set_t + 1] = tags
    end
  end
  P.seq = seq
  P.bytes = P.bytes + added
  many('HSET', K .. 'i', set_i)
  many('HSET', K .. 'r', set_r)
  many('HSET', K .. 'c', set_c)
  many('HSET', K .. 't', set_t)
  save_groups(P, groups)
  touch(P, rids, list, is_new, groups)
  save(P)
  if #new == total then return published(total, first, false, false, dead, P.ver), true end
  if at then
    local written = rids
    rids = {}
    for i = 1, total do rids[i] = false end
    for j, i in ipairs(at) do rids[i] = written[j] end
  end
  return published(total, false, rids, new, dead, P.ver), true
end
